"""What the front reads of a model directory: facts for clients, and the tokenizer's files for routers."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# All that a router may need to tokenize and to build prompts; the weights are none of its business.
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_ENGINE_TOKENIZER = "tokenizer.engine.json"
"""The tokenizer as the engine uses it, for our own clients, where tokenizer.json alone says something else."""

_FIXED_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class TokenizerArchive:
    """A zip file of a tokenizer. The same files give the same bytes."""

    data: bytes
    sha256: str


def build_tokenizer_archive(directory: Path, tokenizer_json: str) -> TokenizerArchive:
    """The tokenizer's files of a model directory as a zip file.

    Args:
        directory: of the model.
        tokenizer_json: the fast tokenizer as transformers sets it up, with what the other files say of it.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _TOKENIZER_FILES:
            path = directory / name
            if path.is_file():
                content = path.read_bytes()
            elif name == "tokenizer.json":
                content = tokenizer_json.encode()
            else:
                continue
            archive.writestr(zipfile.ZipInfo(name, _FIXED_DATE), content, zipfile.ZIP_DEFLATED)
            if name == "tokenizer.json" and json.loads(content) != json.loads(tokenizer_json):
                info = zipfile.ZipInfo(_ENGINE_TOKENIZER, _FIXED_DATE)
                archive.writestr(info, tokenizer_json, zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return TokenizerArchive(data, hashlib.sha256(data).hexdigest())


def read_model_config(directory: Path) -> dict[str, Any]:
    """config.json; empty where there is none that can be read, as the engine is the judge of it."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
