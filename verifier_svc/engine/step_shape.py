"""The sizes of a step on a CUDA device. Kept apart from the step: who counts or chooses needs no kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepShape:
    """What is fixed about a step."""

    num_reqs: int
    num_draft: int
    """K; 0 is a step without drafts."""
    num_tokens: int | None
    """T of a step with chunks of prompts; None: every row decodes."""
    is_plain: bool
    """Rows sample by temperature alone."""
    keeps_hidden: bool = False
    """`DeviceStep.hidden` is that of all tokens."""

    @property
    def num_input_tokens(self) -> int:
        """Padding included."""
        return self.num_reqs * (self.num_draft + 1) if self.num_tokens is None else self.num_tokens
