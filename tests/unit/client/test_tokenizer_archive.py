"""A tokenizer from a service that may be hostile."""

from __future__ import annotations

import io
import zipfile

import pytest

from outrider.client import tokenizer_archive
from outrider.client.errors import ServiceError
from outrider.client.tokenizer_archive import check_archive, read_tokenizer
from tests.byte_tokenizer import byte_tokenizer
from tests.fake_engine_server import tokenizer_archive as archive_of_fake


def archive(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name.replace("_json", ".json").replace("_engine", ".engine"), content)
    return buffer.getvalue()


def test_the_tokenizer_comes_out() -> None:
    data = archive_of_fake()
    check_archive(data, "")
    tokenizer = read_tokenizer(data)
    assert tokenizer is not None
    assert tokenizer.encode("hello").ids == byte_tokenizer().encode("hello").ids


def test_the_engines_own_tokenizer_comes_first() -> None:
    data = archive(tokenizer_json=b"no tokenizer", tokenizer_engine_json=byte_tokenizer().to_str().encode())
    assert read_tokenizer(data) is not None


def test_prompts_are_neither_cut_nor_filled_up() -> None:
    tokenizer = type(byte_tokenizer()).from_str(byte_tokenizer().to_str())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    found = read_tokenizer(archive(tokenizer_json=tokenizer.to_str().encode()))
    assert found is not None
    assert found.encode("hello").ids == list(b"hello")


def test_an_archive_without_a_tokenizer_has_none() -> None:
    assert read_tokenizer(archive(config_json=b"{}")) is None


@pytest.mark.parametrize(
    "data",
    [b"", b"no zip file", archive_of_fake()[:-30], archive(tokenizer_json=b"{}"), archive(tokenizer_json=b"\xff")],
)
def test_what_is_broken_is_one_error(data: bytes) -> None:
    with pytest.raises(ServiceError, match="tokenizer"):
        read_tokenizer(data)


def test_a_zip_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_archive, "MAX_TOKENIZER_BYTES", 1000)
    with pytest.raises(ServiceError, match="larger than 1000 bytes"):
        read_tokenizer(archive(tokenizer_json=b" " * 100_000))


def test_damage_on_the_way_is_noticed() -> None:
    with pytest.raises(ServiceError, match="damaged"):
        check_archive(archive_of_fake(), "0" * 64)
