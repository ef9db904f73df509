"""What the offline API returns, in the shape that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.types import DraftStats


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token at one position, from the unprocessed logits."""

    logprob: float
    rank: int | None
    """1 is the most likely token. None: not among the best ones that were asked for, and the service does not say."""
    decoded_token: str | None
    """None without a tokenizer."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output of a prompt."""

    index: int
    text: str
    """Empty without a tokenizer."""
    token_ids: list[int]
    finish_reason: str
    """stop or length."""
    stop_reason: int | str | None
    """The stop token or stop string that ended it; None for an end token of the model and for a limit."""
    logprobs: list[dict[int, Logprob]] | None
    """For each token: the chosen one and the best ones."""
    cumulative_logprob: float | None
    draft_stats: DraftStats

    @property
    def num_drafts(self) -> int:
        """Steps that verified at least one draft token."""
        return self.draft_stats.num_drafts

    @property
    def num_draft_tokens(self) -> int:
        return self.draft_stats.num_draft_tokens

    @property
    def num_accepted_tokens(self) -> int:
        return self.draft_stats.num_accepted_tokens

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        return self.draft_stats.num_accepted_tokens_per_pos


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All outputs of one prompt."""

    request_id: str
    prompt: str | None
    """None where the prompt came as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """For each prompt token; None for the first, which nothing precedes."""
    outputs: list[CompletionOutput] = field(default_factory=list[CompletionOutput])
    finished: bool = True

    @property
    def draft_stats(self) -> DraftStats:
        """Of all outputs together."""
        total = DraftStats()
        for output in self.outputs:
            total.merge(output.draft_stats)
        return total

    @property
    def num_drafts(self) -> int:
        return self.draft_stats.num_drafts

    @property
    def num_draft_tokens(self) -> int:
        return self.draft_stats.num_draft_tokens

    @property
    def num_accepted_tokens(self) -> int:
        return self.draft_stats.num_accepted_tokens

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        return self.draft_stats.num_accepted_tokens_per_pos
