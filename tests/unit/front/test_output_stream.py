"""From the tokens of each step to what a caller sees: text, cuts, reasons and statistics."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.sampling_params import SamplingParams
from common.types import FinishReason, Request, TokenLogprobs
from tests.byte_tokenizer import END, byte_tokenizer
from verifier_svc.front.output_stream import OutputDelta, OutputStream

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def make_stream(*, tokenizer: bool = True, eos: int = END, **params: Any) -> OutputStream:
    checked = SamplingParams(**params)
    stops = (*checked.stop_token_ids, eos)
    request = Request("r", list(b"prompt"), checked, seed=0, max_len=1000, stop_token_ids=stops)
    return OutputStream(request, byte_tokenizer() if tokenizer else None)


def add(
    stream: OutputStream, text: str | list[int], reason: FinishReason | None = None, *, num_draft: int = 0
) -> OutputDelta:
    """A step that commits `text`, all but its last token drafted and accepted, with logprobs that tell them apart."""
    tokens = list(text.encode()) if isinstance(text, str) else text
    start = len(stream.token_ids)
    logprobs = [TokenLogprobs([token], [-float(start + i)], 1) for i, token in enumerate(tokens)]
    return stream.add(tokens, num_draft, max(0, len(tokens) - 1) if num_draft else 0, reason, logprobs)


def test_a_step_in_the_middle() -> None:
    stream = make_stream()
    delta = add(stream, "abc", num_draft=3)
    assert (delta.token_ids, delta.text, delta.num_accepted_tokens) == ([97, 98, 99], "abc", 2)
    assert delta.finish_reason is None
    assert delta.stop_reason is None


def test_which_part_of_the_text_was_drafted() -> None:
    stream = make_stream(stop=["xy"])
    assert add(stream, "abc", num_draft=3).num_accepted_chars == 2
    assert add(stream, "aé", num_draft=3).num_accepted_chars == 1  # the character is whole with the token after them
    assert add(stream, "abx").num_accepted_chars == 0
    assert add(stream, "abcd", num_draft=4).num_accepted_chars == 4  # the x was held back until now
    assert add(stream, "abxyz", num_draft=5).num_accepted_chars == 2


def test_stop_string_inside_an_accepted_run_cuts_what_is_behind_it() -> None:
    stream = make_stream(stop=["bc"])
    add(stream, "xa")
    delta = add(stream, "ybcdef", num_draft=5)
    assert delta.token_ids == list(b"ybc")
    assert delta.text == "y"
    assert [entry.token_ids for entry in delta.logprobs or []] == [[ord("y")], [ord("b")], [ord("c")]]
    assert (delta.finish_reason, delta.stop_reason) == (STOP, "bc")
    assert delta.num_accepted_tokens == 3
    assert stream.text == "xay"
    assert stream.token_ids == list(b"xaybc")
    assert [entry.logprobs for entry in stream.logprobs] == [[-float(i)] for i in range(5)]
    # Tokens that nobody got are not counted as accepted.
    assert stream.draft_stats.num_accepted_tokens_per_pos == [1, 1, 1, 0, 0]


def test_stop_string_over_several_steps() -> None:
    stream = make_stream(stop=["STOP"])
    assert [add(stream, part).text for part in ("a S", "T", "O")] == ["a ", "", ""]
    delta = add(stream, "P!")
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", [ord("P")], STOP)
    assert stream.text == "a "


def test_stop_string_kept_on_request() -> None:
    stream = make_stream(stop=["bc"], include_stop_str_in_output=True)
    assert add(stream, "abcd").text == "abc"
    assert (stream.text, stream.stop_reason) == ("abc", "bc")


def test_stop_string_before_the_engine_itself_ends_the_request() -> None:
    stream = make_stream(stop=["b"])
    delta = add(stream, "abc", LENGTH)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", STOP, "b")
    assert stream.token_ids == list(b"ab")


def test_held_back_text_comes_out_at_the_limit() -> None:
    stream = make_stream(stop=["STOP"])
    assert add(stream, "a ST").text == "a "
    delta = add(stream, "O", LENGTH)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("STO", LENGTH, None)


@pytest.mark.parametrize("include", [False, True])
def test_text_of_a_stop_token_is_hidden_and_its_id_kept(include: bool) -> None:
    stream = make_stream(stop_token_ids=[ord("!")], include_stop_str_in_output=include)
    delta = add(stream, "ab!", STOP)
    assert delta.text == ("ab!" if include else "ab")
    assert delta.token_ids == list(b"ab!")
    assert (delta.finish_reason, delta.stop_reason) == (STOP, ord("!"))
    assert len(delta.logprobs or []) == 3


def test_end_token_of_the_model_is_no_stop_reason() -> None:
    stream = make_stream(stop_token_ids=[ord("!")])
    delta = add(stream, [ord("a"), END], STOP)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", STOP, None)
    assert stream.token_ids == [ord("a"), END]


def test_end_token_named_by_the_request_is_its_stop_reason() -> None:
    stream = make_stream(stop_token_ids=[END])
    assert add(stream, [END], STOP).stop_reason == END


def test_unfinished_character_is_flushed_at_the_end() -> None:
    stream = make_stream()
    assert add(stream, [0xE2, 0x82]).text == ""
    assert add(stream, [END], STOP).text == "\ufffd"
    assert stream.text == "\ufffd"


def test_min_tokens_holds_stop_strings_off() -> None:
    stream = make_stream(stop=["b"], min_tokens=4)
    assert add(stream, "ab").finish_reason is None
    assert add(stream, "c").finish_reason is None
    delta = add(stream, "b")
    assert (delta.finish_reason, stream.text) == (STOP, "abc")


def test_min_tokens_inside_one_run() -> None:
    stream = make_stream(stop=["b"], min_tokens=3)
    delta = add(stream, "ababab")
    assert (delta.token_ids, stream.text) == (list(b"abab"), "aba")


def test_a_stop_string_let_pass_by_min_tokens_does_not_end_the_output_later() -> None:
    stream = make_stream(stop=["b", "a much longer one"], min_tokens=3)
    assert add(stream, "abcd").finish_reason is None
    assert add(stream, "e", LENGTH).finish_reason is LENGTH
    assert stream.text == "abcde"


def test_without_a_tokenizer_there_are_tokens_only() -> None:
    stream = make_stream(tokenizer=False, stop_token_ids=[7])
    delta = add(stream, [1, 2, 7], STOP)
    assert (delta.token_ids, delta.text, delta.stop_reason) == ([1, 2, 7], "", 7)


def test_a_step_without_tokens_changes_nothing() -> None:
    stream = make_stream()
    delta = stream.add([], 0, 0, None, None)
    assert (delta.token_ids, delta.text, delta.finish_reason) == ([], "", None)
    assert stream.draft_stats.num_drafts == 0


def test_draft_statistics() -> None:
    stream = make_stream()
    stream.add([1], 0, 0, None, None)
    stream.add([2, 3], 3, 1, None, None)
    stream.add([4], 2, 0, None, None)
    stats = stream.draft_stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 5, 1)
    assert stats.num_accepted_tokens_per_pos == [1, 0, 0]


@given(
    steps=st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=8),
    stop=st.lists(st.text("abé", min_size=1, max_size=4), max_size=2),
    min_tokens=st.integers(0, 5),
)
def test_joined_deltas_are_the_whole_in_whatever_steps(steps: list[str], stop: list[str], min_tokens: int) -> None:
    """However the tokens are spread over steps, tokens, text and reasons are those of one token a step."""
    tokens = list("".join(steps).encode())
    alone = make_stream(stop=stop, min_tokens=min_tokens, max_tokens=None)
    for index, token in enumerate(tokens):
        if alone.finish_reason is None:
            add(alone, [token], LENGTH if index == len(tokens) - 1 else None)
    stream = make_stream(stop=stop, min_tokens=min_tokens, max_tokens=None)
    deltas: list[OutputDelta] = []
    for index, text in enumerate(steps):
        if stream.finish_reason is None:
            deltas.append(add(stream, text, LENGTH if index == len(steps) - 1 else None))
    assert "".join(delta.text for delta in deltas) == stream.text == alone.text
    assert [token for delta in deltas for token in delta.token_ids] == stream.token_ids == alone.token_ids
    assert [entry for delta in deltas for entry in delta.logprobs or []] == stream.logprobs == alone.logprobs
    assert (stream.finish_reason, stream.stop_reason) == (alone.finish_reason, alone.stop_reason)
