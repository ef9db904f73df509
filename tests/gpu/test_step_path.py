"""`debug_step_path`: no step waits for the device or allocates while it is handed over, and one that does ends all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from common.errors import EngineClosedError
from common.sampling_params import SamplingParams
from outrider.llm import LLM
from outrider.outputs import RequestOutput
from tests.cuda_llm import FEW_BLOCKS, PLAIN, CudaRuns, check_same, cuda_llm, step_counts, stream_with_aborts
from tests.identity_workload import MIXED, PARAMS, visible

if TYPE_CHECKING:
    from verifier_svc.engine.device_step import DeviceStep

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("cuda_graphs", ["full", "piecewise", "none"])
def test_no_kind_of_step_waits_or_allocates(
    tiny_cuda_llama: Path, references: dict[str, list[RequestOutput]], cuda_graphs: str
) -> None:
    """Prompts in chunks beside rows that decode, plain and processed, log probabilities, preemptions and aborts."""
    # Steps with prompt log probabilities do wait, and are not checked: those of these requests all are.
    checked = [params.model_copy(update={"prompt_logprobs": None}) for params in MIXED]
    with cuda_llm(tiny_cuda_llama, debug_step_path=True, max_num_batched_tokens=64, cuda_graphs=cuda_graphs) as llm:
        runs = CudaRuns(llm)
        for num_blocks in (None, FEW_BLOCKS):
            check_same(runs.generate(PLAIN, num_blocks=num_blocks), references["plain"])
            assert visible(runs.generate(checked, num_blocks=num_blocks)) == visible(references["mixed"])
            assert (runs.num_preemptions > 0) == (num_blocks is not None)
        runs.empty_cache()
        aborted = [params.model_copy(update={"n": 1}) for params in checked]
        stream_with_aborts(llm, [PARAMS["greedy"], PARAMS["top-p"]], aborted)
        replays, num_eager = step_counts(llm)
        if cuda_graphs != "none":
            used = {key for key, count in replays.items() if count > 0}
            assert {(8, 3, 64), (8, 3, 32), (1, 3, 4)} <= used, "a mixed step, and large and small ones that decode"
            assert num_eager == 0
        check_same(runs.generate(MIXED), references["mixed"])


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def checked(tiny_cuda_llama: Path) -> Iterator[LLM]:
    """An engine whose steps have all been fine so far."""
    with cuda_llm(
        tiny_cuda_llama, debug_step_path=True, drafter="none", max_num_seqs=1, max_num_batched_tokens=16
    ) as llm:
        llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
        yield llm


def check_failed(llm: LLM, message: str) -> None:
    """The next step ends the engine, and the error names what it did."""
    with pytest.raises(EngineClosedError, match="a step failed, the engine cannot go on") as caught:
        llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
    cause = caught.value.__cause__
    assert isinstance(cause, RuntimeError)
    assert message in str(cause)
    with pytest.raises(EngineClosedError, match=message):
        llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
    assert torch.cuda.get_sync_debug_mode() == 0, "what runs outside a step may wait"


def patch_enqueue(monkeypatch: pytest.MonkeyPatch, also: Callable[[DeviceStep], object]) -> None:
    """Each step does something more."""
    from verifier_svc.engine.device_step import DeviceStep  # late: it imports kernels, see tests/kernels/conftest.py

    enqueue = DeviceStep.enqueue

    def patched(step: DeviceStep) -> None:
        enqueue(step)
        also(step)

    monkeypatch.setattr(DeviceStep, "enqueue", patched)


def test_a_hidden_synchronization_ends_the_engine(checked: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_enqueue(monkeypatch, lambda step: step.outcome[0, 0].item())
    check_failed(checked, "synchronizing CUDA operation")


def test_a_hidden_allocation_ends_the_engine(checked: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_enqueue(monkeypatch, lambda step: torch.empty(1000, device="cuda"))
    check_failed(checked, "a step allocated memory while it was handed over")


def test_a_hidden_allocation_of_pinned_memory_ends_the_engine(checked: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_enqueue(monkeypatch, lambda step: torch.empty(1000, pin_memory=True))
    check_failed(checked, "a step allocated memory while it was handed over")


def test_without_the_check_a_hidden_synchronization_passes(
    tiny_cuda_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_enqueue(monkeypatch, lambda step: step.outcome[0, 0].item())
    with cuda_llm(tiny_cuda_llama, drafter="none", max_num_seqs=1, max_num_batched_tokens=16) as llm:
        assert len(llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


def test_a_graph_that_nobody_holds_is_not_freed_while_another_is_captured() -> None:
    """As of an engine that has failed: its frames hold each other until the collector comes, whenever that is."""
    from verifier_svc.engine.device_step import _capture  # late: it imports kernels, see tests/kernels/conftest.py

    tensor = torch.zeros(8, device="cuda")

    def add() -> None:
        tensor.add_(1)

    def litter() -> None:
        assert len([[i] for i in range(1000)]) == 1000

    gone: list[object] = [_capture([add], None)]
    gone.append(gone)
    del gone
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        graph = _capture([litter, add], None)
    finally:
        gc.set_threshold(*thresholds)
    graph.replay()
    assert tensor.tolist() == [1.0] * 8
