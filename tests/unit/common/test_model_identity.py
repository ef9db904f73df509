"""Fingerprints: equal for the same tokens, however the files are written, and different for any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import EngineConfig
from common.errors import InvalidArgumentError, ModelLoadError
from common.model_identity import read_model_identity, vocabulary_fingerprint
from tests.tiny_models import make_tokenizer


def write_config(directory: Path, **values: object) -> None:
    (directory / "config.json").write_text(json.dumps(values))


def test_the_vocabulary_counts_and_not_its_file(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    write_config(tmp_path, vocab_size=320)
    before = read_model_identity(tmp_path)
    assert before.vocab_size == 320
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=3))
    assert read_model_identity(tmp_path) == before
    write_config(tmp_path, vocab_size=320, hidden_size=8)
    other_model = read_model_identity(tmp_path)
    assert other_model.vocabulary_fingerprint == before.vocabulary_fingerprint
    assert other_model.model_fingerprint != before.model_fingerprint
    make_tokenizer(tmp_path, vocab_size=330)
    assert read_model_identity(tmp_path).vocabulary_fingerprint != before.vocabulary_fingerprint


def test_one_token_or_one_id_makes_another_vocabulary() -> None:
    prints = {vocabulary_fingerprint(v) for v in ({"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 0}, {"a": 0, "\ud800": 1})}
    assert len(prints) == 4
    assert vocabulary_fingerprint({"b": 1, "a": 0}) == vocabulary_fingerprint({"a": 0, "b": 1})


def test_without_a_tokenizer_there_is_no_fingerprint(tmp_path: Path) -> None:
    write_config(tmp_path, vocab_size=7)
    assert read_model_identity(tmp_path).vocabulary_fingerprint == ""


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"vocab_size": "many"}'])
def test_a_broken_directory_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json: expected a JSON object with vocab_size"):
        read_model_identity(tmp_path)
    write_config(tmp_path, vocab_size=7)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: expected a tokenizer"):
        read_model_identity(tmp_path)


@pytest.mark.parametrize(
    ("drafter", "addresses"),
    [
        ("none", ()),
        ("ngram", ()),
        ("grpc://localhost:50052", ("localhost:50052",)),
        ("grpc://[::1]:1,grpc://10.0.0.1:65535", ("[::1]:1", "10.0.0.1:65535")),
    ],
)
def test_addresses_of_drafters(drafter: str, addresses: tuple[str, ...]) -> None:
    assert EngineConfig(model="m", drafter=drafter).drafter_addresses == addresses


@pytest.mark.parametrize(
    "drafter",
    [
        "grpc://", "grpc://host", "grpc://host:", "grpc://host:0", "grpc://host:65536", "host:1", "http://host:1",
        "grpc://a:1,", "grpc://a:1,b:2", "grpc://a:1,grpc://a:1", "grpc://a b:1", "ngram,grpc://a:1",
    ],
)  # fmt: skip
def test_what_is_no_drafter_is_refused(drafter: str) -> None:
    with pytest.raises(InvalidArgumentError, match="drafter = "):
        EngineConfig(model="m", drafter=drafter)
