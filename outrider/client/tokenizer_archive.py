"""The tokenizer that a service sends: a zip file in pieces. The sender is not trusted with this process's memory."""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib

from tokenizers import Tokenizer

from outrider.client.errors import ServiceError

MAX_ARCHIVE_BYTES = 64 << 20
MAX_TOKENIZER_BYTES = 256 << 20

# The first one found counts. A service whose tokenizer.json alone would encode differently sends the other one too.
_NAMES = ("tokenizer.engine.json", "tokenizer.json")


def check_archive(data: bytes, sha256: str) -> None:
    """Raises ServiceError if the pieces were not all, or not the ones that were meant."""
    found = hashlib.sha256(data).hexdigest()
    if sha256 and found != sha256.lower():
        raise ServiceError(f"the tokenizer arrived damaged: its SHA-256 is {found}, expected {sha256[:64]}")


def read_tokenizer(data: bytes) -> Tokenizer | None:
    """The tokenizer in a zip file; None if there is none in it.

    Raises:
        ServiceError: no zip file, a tokenizer that cannot be read, or one of more than `MAX_TOKENIZER_BYTES`.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = set(archive.namelist())
            name = next((name for name in _NAMES if name in names), None)
            if name is None:
                return None
            with archive.open(name) as file:
                text = file.read(MAX_TOKENIZER_BYTES + 1)  # what it says of its own size may be wrong
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ServiceError(f"the tokenizer cannot be unpacked ({error}): expected a zip file") from None
    if len(text) > MAX_TOKENIZER_BYTES:
        raise ServiceError(f"the tokenizer is larger than {MAX_TOKENIZER_BYTES} bytes")
    try:
        tokenizer = Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises plain Exception
        raise ServiceError(f"the tokenizer cannot be read ({error})") from None
    # A file may ask for these; a prompt is neither cut nor filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
