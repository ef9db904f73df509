"""Stop strings: found in the text as it grows, and never shown in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one output for the stop strings of its request.

    Args:
        stop: strings that end the output; may be empty.
        include_in_output: keep the stop string that was found.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self._stop = stop
        self._include = include_in_output
        self._longest = max((len(text) for text in stop), default=0)

    def find(self, text: str, num_new: int) -> tuple[int, str] | None:
        """Where to cut `text`, and the stop string found, if one ends within its last `num_new` characters.

        The one that ends first wins, and the longest of those that end together: so the cut is the same in whatever
        pieces the text comes.
        """
        hits: list[tuple[int, int, str]] = []
        for stop in self._stop:
            begin = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
            if begin >= 0:
                hits.append((begin + len(stop), begin, stop))
        if not hits:
            return None
        end, begin, stop = min(hits)
        return end if self._include else begin, stop

    def num_safe(self, text: str) -> int:
        """Length of the part of `text` that can be shown: the rest may be the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stop):
                return len(text) - size
        return len(text)
