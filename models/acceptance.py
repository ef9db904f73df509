"""How many draft tokens a target would accept, replayed over texts that the target has already written.

A draft token is accepted only if it equals the target's own choice. So as long as draft tokens are accepted the
drafter's context is the target's text itself, and one pass of the draft model over that text tells every draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class AcceptanceCount:
    """Totals over many texts. A step without a draft counts in num_steps alone."""

    k: int
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted_per_position = [0] * self.k

    def summary(self) -> dict[str, object]:
        drafts = max(1, self.num_drafts)
        return {
            "steps": self.num_steps,
            "draft_share": self.num_drafts / max(1, self.num_steps),
            "acceptance_rate": self.num_accepted_tokens / max(1, self.num_draft_tokens),
            "acceptance_length": 1 + self.num_accepted_tokens / drafts,
            "accepted_per_position": [count / drafts for count in self.accepted_per_position],
            "tokens_per_step": 1 + self.num_accepted_tokens / max(1, self.num_steps),
        }


def replay(
    tokens: Sequence[int], prompt_len: int, draft: Callable[[int], Sequence[int]], count: AcceptanceCount
) -> None:
    """Step through one text, and add what `draft(base_len)` proposes after tokens[:base_len] to `count`.

    Each step drafts up to count.k tokens, takes those that match, and one token of the target. Steps that would
    draft past the end of the text are left out, as their last tokens have nothing to match.
    """
    base_len = prompt_len
    while base_len + count.k <= len(tokens):
        proposed = draft(base_len)[: count.k]
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == tokens[base_len + accepted]:
            count.accepted_per_position[accepted] += 1
            accepted += 1
        count.num_steps += 1
        count.num_drafts += bool(proposed)
        count.num_draft_tokens += len(proposed)
        count.num_accepted_tokens += accepted
        base_len += accepted + 1


def ngram_draft(context: NDArray[np.int64], k: int, max_n: int = 5, min_n: int = 2) -> list[int]:
    """Up to k tokens that followed the most recent earlier occurrence of the last n tokens, longest n first.

    Empty if even the last min_n tokens [context_len] do not occur earlier (prompt lookup decoding).
    """
    for n in range(max_n, min_n - 1, -1):
        if len(context) <= n:
            continue
        # The last window is the pattern itself.
        windows = np.lib.stride_tricks.sliding_window_view(context, n)[:-1]  # [context_len - n, n]
        found = np.flatnonzero((windows == context[-n:]).all(axis=1))
        if len(found):
            begin = int(found[-1]) + n
            return context[begin : begin + k].tolist()
    return []
