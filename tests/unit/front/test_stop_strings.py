"""Stop strings end a text where they first end in it, and no part of one is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_svc.front.stop_strings import StopStrings


def show(parts: list[str], stop: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """What a reader is shown after each part, and the stop string that ended the text."""
    watcher = StopStrings(stop, include)
    text, shown = "", [""]
    for part in parts:
        text += part
        hit = watcher.find(text, len(part)) if part else None
        if hit is not None:
            cut, found = hit
            already = len("".join(shown))
            assert already <= cut, "a part of the stop string was shown"
            return [*shown[1:], text[already:cut]], found
        end = watcher.num_safe(text)
        assert end >= len("".join(shown)), "text was taken back"
        shown.append(text[len("".join(shown)) : end])
    return [*shown[1:], text[len("".join(shown)) :]], None


def cut_whole(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """The same of the whole text: the first place where a stop string ends, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = max((s for s in stop if text[:end].endswith(s)), key=len, default=None)
        if found is not None:
            return text[: end if include else end - len(found)], found
    return text, None


def test_text_without_a_stop_string_is_shown_at_once() -> None:
    assert show(["one ", "two"], []) == (["one ", "two", ""], None)
    assert show(["one ", "two"], ["xyz"]) == (["one ", "two", ""], None)


def test_found_within_one_part() -> None:
    assert show(["one STOP two"], ["STOP"]) == (["one "], "STOP")


def test_found_across_parts() -> None:
    assert show(["one S", "T", "", "OP two"], ["STOP"]) == (["one ", "", "", ""], "STOP")


def test_included_in_the_output() -> None:
    assert show(["one S", "TOP two"], ["STOP"], include=True) == (["one ", "STOP"], "STOP")


def test_held_back_text_comes_out_when_it_is_no_stop_string() -> None:
    assert show(["a S", "T", "x"], ["STOP"]) == (["a ", "", "STx", ""], None)


def test_held_back_text_comes_out_at_the_end() -> None:
    assert show(["a ST"], ["STOP"]) == (["a ", "ST"], None)


def test_a_false_start_within_a_stop_string() -> None:
    assert show(list("aabaabaac"), ["aabaac"]) == (["", "", "", "", "", "aab", "", "", ""], "aabaac")


@pytest.mark.parametrize("stop", [["two", "one"], ["one", "two"]])
def test_the_first_in_the_text_wins(stop: list[str]) -> None:
    assert show(["a one two"], stop) == (["a "], "one")


@pytest.mark.parametrize("stop", [["c", "bc"], ["bc", "c"]])
def test_the_longest_of_those_that_end_together(stop: list[str]) -> None:
    assert show(["ab", "cd"], stop)[1] == "bc"


@pytest.mark.parametrize("parts", [["abcd"], ["ab", "cd"], list("abcd")])
def test_the_one_that_ends_first_wins_in_whatever_parts(parts: list[str]) -> None:
    assert show(parts, ["abcd", "c"])[1] == "c"


def test_only_the_new_text_counts() -> None:
    """A stop string that was let pass, as under min_tokens, is not found later in the reach of a longer one."""
    watcher = StopStrings(["a", "a much longer one"], include_in_output=False)
    assert watcher.find("xa", 1) == (1, "a")
    assert watcher.find("xab", 1) is None


@settings(max_examples=500)
@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
)
def test_parts_are_cut_as_the_whole_is(parts: list[str], stop: list[str], include: bool) -> None:
    shown, found = show(parts, stop, include)
    assert ("".join(shown), found) == cut_whole("".join(parts), stop, include)
