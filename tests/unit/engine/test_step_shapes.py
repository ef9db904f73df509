"""Which steps an engine on a GPU is built with: one for every plan, and none twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from common.config import EngineConfig

pytest.importorskip("triton", reason="the kernels of a step are written in it", exc_type=ImportError)

if TYPE_CHECKING:
    from verifier_svc.engine.step_shape import StepShape

LIMITS = (16, 63, 64, 65, 512, 513, 1000, 1024, 1025, 2048, 5000, 8192)


def make_config(**options: Any) -> EngineConfig:
    return EngineConfig(model="m", device="cuda", **options)


def token_counts(limit: int) -> list[int]:
    # Late: whether kernels are interpreted is decided when they are imported, and tests/kernels has a say in that.
    from verifier_svc.engine.build_cuda import _token_counts

    return _token_counts(make_config(max_num_batched_tokens=limit, max_num_seqs=16))


def shapes(config: EngineConfig, num_draft: int) -> tuple[list[StepShape], list[StepShape]]:
    """Those that are graphs, and the others."""
    from verifier_svc.engine.build_cuda import _captured_shapes, _eager_shapes

    return _captured_shapes(config, num_draft), _eager_shapes(config, num_draft)


@pytest.mark.parametrize("limit", LIMITS)
def test_every_number_of_tokens_has_a_mixed_step_that_is_not_much_larger(limit: int) -> None:
    counts = token_counts(limit)
    assert counts == sorted(set(counts))
    for num_tokens in range(1, limit + 1):
        smallest = next((count for count in counts if count >= num_tokens), None)
        assert smallest is not None, f"{num_tokens} tokens fit no step"
        assert smallest - num_tokens < max(64, num_tokens / 3), f"a step of {smallest} for {num_tokens} tokens"
    assert len(counts) == 1 or counts[-2] < limit, "a step that no plan needs"


@pytest.mark.parametrize("limit", [64, 1024, 2048])
@pytest.mark.parametrize("num_draft", [0, 1, 5])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 8, 33, 64])
def test_every_plan_has_a_step(max_num_seqs: int, num_draft: int, limit: int) -> None:
    config = make_config(max_num_seqs=max_num_seqs, max_num_batched_tokens=limit)
    captured, eager = shapes(config, num_draft)
    every = captured + eager
    assert len(set(every)) == len(every)

    def fits(num_reqs: int, drafts: int, num_tokens: int | None, is_plain: bool, keeps_hidden: bool = False) -> bool:
        return any(
            shape.is_plain == is_plain
            and shape.keeps_hidden == keeps_hidden
            and shape.num_reqs >= num_reqs
            and shape.num_draft >= drafts
            and (shape.num_tokens or 0) >= (num_tokens or 0)
            and (shape.num_tokens is None) == (num_tokens is None)
            for shape in every
        )

    for is_plain in (True, False):
        for num_reqs in range(1, max_num_seqs + 1):
            for drafts in range(num_draft + 1):
                assert fits(num_reqs, drafts, None, is_plain)
                assert fits(num_reqs, drafts, limit, is_plain)
                assert fits(num_reqs, drafts, limit, is_plain, keeps_hidden=True)


def test_decode_steps_are_graphs_for_powers_of_two_with_and_without_drafts() -> None:
    captured, eager = shapes(make_config(max_num_seqs=6, max_num_batched_tokens=64), 3)
    decode = {(shape.num_reqs, shape.num_draft) for shape in captured if shape.num_tokens is None}
    assert decode == {(size, k) for size in (1, 2, 4, 6) for k in (0, 3)}
    assert all(shape.keeps_hidden for shape in eager)


def test_large_mixed_steps_are_no_graphs() -> None:
    from verifier_svc.engine.build_cuda import MAX_CAPTURED_TOKENS

    captured, eager = shapes(make_config(max_num_batched_tokens=4096), 3)
    large = [shape for shape in eager if not shape.keeps_hidden]
    assert large
    assert all(shape.num_tokens is not None and shape.num_tokens > MAX_CAPTURED_TOKENS for shape in large)
    assert not any(shape.keeps_hidden for shape in captured)
    assert all(shape.num_tokens is None or shape.num_tokens <= MAX_CAPTURED_TOKENS for shape in captured)
    assert max(shape.num_tokens or 0 for shape in captured) == MAX_CAPTURED_TOKENS


def test_the_largest_graph_is_captured_first() -> None:
    """Graphs share their memory: the first one takes what all others need."""
    captured, _ = shapes(make_config(max_num_seqs=8), 3)
    assert captured[0].num_tokens == max(shape.num_tokens or 0 for shape in captured)
