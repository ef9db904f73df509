"""Text of an output token by token: never half a character, and joined the text of the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.byte_tokenizer import END, START, VOCAB_SIZE, byte_fallback_tokenizer, byte_tokenizer, word_tokenizer
from verifier_svc.front.detokenizer import Detokenizer

PROMPT = list(b"prompt ")


def pieces(token_ids: list[int], prompt: list[int] | None = None, skip_special_tokens: bool = True) -> list[str]:
    """What each token adds, and what the end adds."""
    detokenizer = Detokenizer(byte_tokenizer(), PROMPT if prompt is None else prompt, skip_special_tokens)
    return [*(detokenizer.add(token) for token in token_ids), detokenizer.flush()]


def test_a_character_comes_out_with_its_last_byte() -> None:
    assert pieces(list("aé€😀b".encode())) == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_unfinished_character_is_flushed_as_a_replacement(cut: int) -> None:
    token_ids = list("x😀".encode())[: 1 + cut]
    assert pieces(token_ids) == ["x", *[""] * cut, "\ufffd"]


def test_nothing_to_flush_behind_whole_characters() -> None:
    assert pieces(list("aé".encode()))[-1] == ""
    assert pieces([]) == [""]


def test_a_replacement_character_of_the_model_is_kept() -> None:
    assert "".join(pieces(list("a\ufffd".encode()))) == "a\ufffd"
    assert "".join(pieces(list("a\ufffdb".encode()))) == "a\ufffdb"


def test_bytes_that_are_no_character_do_not_hold_back_what_follows() -> None:
    assert pieces([0xFF, ord("a"), 0x80, ord("b")]) == ["", "\ufffda", "", "\ufffdb", ""]


def test_special_tokens_are_skipped() -> None:
    assert pieces([ord("a"), END, ord("b"), START, END]) == ["a", "", "b", "", "", ""]


def test_special_tokens_are_kept() -> None:
    token_ids = [ord("a"), END, ord("b"), END]
    assert pieces(token_ids, skip_special_tokens=False) == ["a", "<end>", "b", "<end>", ""]


def test_a_special_token_within_a_character() -> None:
    first, second = "é".encode()
    assert "".join(pieces([first, END, second])) == "é"
    assert "".join(pieces([first, END, second], skip_special_tokens=False)) == "\ufffd<end>\ufffd"


def test_a_token_without_text_adds_nothing() -> None:
    assert pieces([ord("a"), 258, ord("b")]) == ["a", "", "b", ""]


def test_first_token_reads_as_it_does_behind_the_prompt() -> None:
    detokenizer = Detokenizer(word_tokenizer(), [0, 1], skip_special_tokens=True)
    assert [detokenizer.add(token) for token in (2, 3, 0)] == [" three", "s", " one"]


@pytest.mark.parametrize("prompt", [b"\xe2\x82", b"a long prompt \xe2\x82", b"\x82" * 10])
def test_a_prompt_that_ends_within_a_character_is_not_repeated(prompt: bytes) -> None:
    assert "".join(pieces([0xAC, ord("c")], list(prompt))) == "\ufffdc"
    assert "".join(pieces([ord("c")], list(prompt))) == "c"


@pytest.mark.parametrize("prompt", [[START], [START, END], [258]])
def test_a_prompt_without_text(prompt: list[int]) -> None:
    assert "".join(pieces(list("é!".encode()), prompt)) == "é!"


def test_a_byte_that_spoils_the_characters_before_it() -> None:
    """A byte-fallback decoder takes back the letters that stand in one run with a broken byte; they are out already."""
    detokenizer = Detokenizer(byte_fallback_tokenizer(), [256], skip_special_tokens=True)
    added = [detokenizer.add(token) for token in (ord("a"), 0xFF, 256, ord("b"), 256)]
    assert added == ["a", "", "\ufffd word", "b", " word"]


@given(
    token_ids=st.lists(st.integers(0, 256) | st.sampled_from([0xE2, 0x82, 0xAC, 256]), max_size=20),
    prompt=st.lists(st.integers(0, 256), max_size=12),
)
def test_no_output_stops_a_byte_fallback_decoder(token_ids: list[int], prompt: list[int]) -> None:
    detokenizer = Detokenizer(byte_fallback_tokenizer(), prompt, skip_special_tokens=True)
    text = "".join(detokenizer.add(token) for token in token_ids) + detokenizer.flush()
    assert text.count("word") == token_ids.count(256)


@given(text=st.text(max_size=20), prompt=st.text(max_size=12))
def test_text_of_a_byte_fallback_tokenizer_comes_out_as_it_went_in(text: str, prompt: str) -> None:
    detokenizer = Detokenizer(byte_fallback_tokenizer(), [256, *prompt.encode()], skip_special_tokens=True)
    token_ids = text.encode()
    assert "".join(detokenizer.add(token) for token in token_ids) + detokenizer.flush() == text


@given(text=st.text(max_size=20), prompt=st.text(max_size=12))
def test_text_comes_out_as_it_went_in(text: str, prompt: str) -> None:
    assert "".join(pieces(list(text.encode()), list(prompt.encode()))) == text


@given(
    token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1) | st.sampled_from([0xE2, 0x82, 0xAC, 0xC3, END]), max_size=30),
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12),
    skip=st.booleans(),
)
def test_joined_pieces_are_the_decoded_whole(token_ids: list[int], prompt: list[int], skip: bool) -> None:
    assert "".join(pieces(token_ids, prompt, skip)) == byte_tokenizer().decode(token_ids, skip_special_tokens=skip)
