"""What the wiring makes of options that depend on the device."""

from __future__ import annotations

from typing import Any

import pytest

from common.config import EngineConfig
from outrider.local import CUDA_PREFILL_BESIDE_DECODE, _max_prefill_beside_decode


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": "cpu"}, None),
        ({"device": "cuda"}, CUDA_PREFILL_BESIDE_DECODE),
        ({"device": "cpu", "max_prefill_beside_decode": 64}, 64),
        ({"device": "cuda", "max_prefill_beside_decode": 64}, 64),
    ],
)
def test_prompt_tokens_beside_decode(options: dict[str, Any], expected: int | None) -> None:
    assert _max_prefill_beside_decode(EngineConfig(model="m", **options)) == expected
