"""What a row needs beyond an argmax: one integer a row, on the host and on the device."""

from __future__ import annotations

from typing import Final

RANDOM: Final = 1  # a temperature: noise
MIN_P: Final = 2  # random rows only
TOP_K: Final = 4  # random rows only
TOP_P: Final = 8  # random rows only
PENALTIES: Final = 16
LOGIT_BIAS: Final = 32
BAD_WORDS: Final = 64
MIN_TOKENS: Final = 128
TRUNCATED: Final = TOP_K | TOP_P
PROCESSED: Final = PENALTIES | LOGIT_BIAS | BAD_WORDS | MIN_TOKENS
