"""Tokenizers for tests that need no model and no torch."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = 256
START = 257
VOCAB_SIZE = 260


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """Token id = byte value; 256 `<end>` and 257 `<start>` are special, 258 and 259 stand for nothing."""
    tokenizer = Tokenizer(models.BPE(vocab={_character(byte): byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<start>", special=True)])
    return tokenizer


@functools.cache
def word_tokenizer() -> Tokenizer:
    """Words with a leading space each, which the decoder drops at the beginning of a text, as SentencePiece does."""
    words = ["\u2581one", "\u2581two", "\u2581three", "s"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@functools.cache
def byte_fallback_tokenizer() -> Tokenizer:
    """Token id = byte value, spelt <0x..> as SentencePiece does; 256 is the word `word` with a leading space."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581word": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@functools.cache
def _character(byte: int) -> str:
    """How byte-level BPE writes a byte: as itself where that can be printed, else as the next character from 256 on."""
    unprintable = [b for b in range(256) if b <= 0x20 or 0x7F <= b <= 0xA0 or b == 0xAD]
    return chr(256 + unprintable.index(byte)) if byte in unprintable else chr(byte)
