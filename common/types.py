"""Values that cross process or package borders. Host-only: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from common.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended, in the words of the OpenAI API."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # cancelled by the caller


@dataclass(frozen=True, slots=True)
class Request:
    """One output stream to produce: a prompt, how to sample, and where to stop. Checked before it is made."""

    request_id: str
    prompt_token_ids: list[int]
    """The prompt; for a request that goes on after a failure elsewhere also the output it had got there."""
    params: SamplingParams
    seed: int
    """Never None here: drawn at random when the caller gave none."""
    max_len: int
    """Prompt + output tokens at most."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens of the request and the model's end tokens, unless ignore_eos."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never completed."""
    num_speculative_tokens: int = 0
    """At most this many draft tokens a step."""
    num_output_tokens: int = 0
    """How many of `prompt_token_ids`, at their end, are output already. Penalties, limits and stop strings count them
    as such, so that the output goes on as if it had never stopped."""

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt proper."""
        return len(self.prompt_token_ids) - self.num_output_tokens


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position, from the unprocessed logits: the chosen token first, then the best ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the chosen token, 1 is the most likely one."""


@dataclass(slots=True)
class DraftStats:
    """What drafting did for one output. A row without a draft does not count as drafted."""

    num_drafts: int = 0
    """Steps that verified at least one draft token."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list[int])

    def add(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one step of one row."""
        if num_draft_tokens == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        per_pos = self.num_accepted_tokens_per_pos
        while len(per_pos) < num_draft_tokens:
            per_pos.append(0)
        for position in range(num_accepted_tokens):
            per_pos[position] += 1

    def merge(self, other: DraftStats) -> None:
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        per_pos = self.num_accepted_tokens_per_pos
        per_pos += [0] * (len(other.num_accepted_tokens_per_pos) - len(per_pos))
        for position, count in enumerate(other.num_accepted_tokens_per_pos):
            per_pos[position] += count

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a step with a draft, the bonus token included: 1 + accepted / drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0
