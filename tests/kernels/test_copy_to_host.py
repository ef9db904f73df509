"""Words that a kernel writes to the host."""

from __future__ import annotations

import pytest
import torch

from model_executor.kernels.copy_to_host import copy_to_host


@pytest.mark.parametrize("shape", [(1, 6), (64, 9), (300, 12)])
def test_all_words_arrive_and_nothing_behind_them_changes(device: torch.device, shape: tuple[int, int]) -> None:
    source = torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, device=device)
    target = torch.full((4000,), 7, dtype=torch.int32, pin_memory=device.type == "cuda")
    copy_to_host(source, target)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(target[: source.numel()], source.cpu().view(-1))
    assert (target[source.numel() :] == 7).all()
