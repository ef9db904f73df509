"""Fingerprints of a model directory, by which a verifier and a drafter tell whether they speak of the same tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from common.draft_exchange import ModelIdentity
from common.errors import ModelLoadError


def read_model_identity(directory: Path) -> ModelIdentity:
    """Identity of a Hugging Face model directory; a directory without tokenizer.json has no vocabulary fingerprint.

    Raises:
        ModelLoadError: there is no config.json with a vocab_size, or a file cannot be read.
    """
    try:
        config_bytes = (directory / "config.json").read_bytes()
        vocab_size = int(json.loads(config_bytes)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{directory}/config.json: expected a JSON object with vocab_size ({error})") from None
    path = directory / "tokenizer.json"
    fingerprint = ""
    if path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises its own bare Exception
            raise ModelLoadError(f"{path}: expected a tokenizer ({error})") from None
        fingerprint = vocabulary_fingerprint(tokenizer.get_vocab(with_added_tokens=True))
    return ModelIdentity(hashlib.sha256(config_bytes).hexdigest(), fingerprint, vocab_size)


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """SHA-256 over all (token, id) pairs in the order of the ids, hexadecimal."""
    digest = hashlib.sha256()
    for token, token_id in sorted(vocabulary.items(), key=lambda pair: (pair[1], pair[0])):
        digest.update(f"{token_id}\t{token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
