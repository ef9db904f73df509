"""The archive of GetTokenizer, from the front that makes it to the client that reads it."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

from outrider.client.tokenizer_archive import check_archive, read_tokenizer
from tests.byte_tokenizer import byte_tokenizer
from verifier_svc.front.model_files import build_tokenizer_archive


def names(data: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.namelist()


def test_one_tokenizer_is_sent_once(tmp_path: Path) -> None:
    text = byte_tokenizer().to_str()
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "config.json").write_text("{}")
    archive = build_tokenizer_archive(tmp_path, json.dumps(json.loads(text), indent=1))
    assert names(archive.data) == ["config.json", "tokenizer.json"]
    check_archive(archive.data, archive.sha256)
    assert build_tokenizer_archive(tmp_path, text) == archive


def test_a_client_encodes_as_the_engine_where_the_file_alone_does_not(tmp_path: Path) -> None:
    """tokenizer_config.json may ask for a token before each text, which transformers builds into the tokenizer."""
    plain = json.loads(byte_tokenizer().to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    special = {"id": "<start>", "ids": [257], "tokens": ["<start>"]}
    begins = [{"SpecialToken": {"id": "<start>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": begins, "pair": begins, "special_tokens": {"<start>": special}}
    archive = build_tokenizer_archive(tmp_path, json.dumps(plain | {"post_processor": processor}))
    assert names(archive.data) == ["tokenizer.json", "tokenizer.engine.json"]
    tokenizer = read_tokenizer(archive.data)
    assert tokenizer is not None
    assert tokenizer.encode("a").ids == [257, ord("a")]


def test_a_directory_without_the_file_gets_the_engines(tmp_path: Path) -> None:
    archive = build_tokenizer_archive(tmp_path, byte_tokenizer().to_str())
    assert names(archive.data) == ["tokenizer.json"]
    assert read_tokenizer(archive.data) is not None
