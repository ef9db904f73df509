from __future__ import annotations

import torch

from model_executor.attention.workspace import Workspace


def test_gather_is_index_select_at_every_size() -> None:
    cache = torch.randn(50, 16, 2, 8)
    workspace = Workspace(torch.float32)
    for count in (3, 1, 40, 7, 41):
        blocks = torch.randperm(50)[:count]
        assert torch.equal(workspace.gather(cache, blocks), cache[blocks])


def test_memory_is_kept() -> None:
    cache = torch.randn(50, 16, 2, 8)
    workspace = Workspace(torch.float32)
    first = workspace.gather(cache, torch.arange(33)).data_ptr()
    assert workspace.gather(cache, torch.arange(20)).data_ptr() == first
    assert workspace.gather(cache, torch.arange(50)).data_ptr() == first, "grows by powers of two"


def test_memory_of_inference_mode_serves_outside_of_it() -> None:
    cache = torch.randn(5, 16, 2, 8)
    workspace = Workspace(torch.float32)
    with torch.inference_mode():
        workspace.gather(cache, torch.arange(4))
    assert torch.equal(workspace.gather(cache, torch.arange(3)), cache[:3])
