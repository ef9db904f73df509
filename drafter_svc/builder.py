"""Wiring of a drafter."""

from __future__ import annotations

from pathlib import Path

import torch

from common.draft_exchange import DrafterLimits, ModelIdentity
from common.model_identity import read_model_identity
from drafter_svc.config import DrafterConfig
from drafter_svc.core import DrafterCore
from drafter_svc.methods.registry import build_method
from drafter_svc.sessions import RowPool
from model_executor.drafting import DraftMethod
from model_executor.row_state import RowState

_BLOCK_SIZE = 16


def build_core(config: DrafterConfig, method: DraftMethod | None = None) -> DrafterCore:
    """A drafter without its wires.

    Args:
        config: what to draft with, and its limits.
        method: used instead of the one that `config.method` names.

    Raises:
        UnknownOptionError: there is no such method.
        ModelLoadError: the model directory cannot be read.
    """
    if method is None:
        method = build_method(config.method, config.model_dump())
    model = ModelIdentity() if config.model is None else read_model_identity(Path(config.model))
    rows = RowState(config.max_rows, config.max_model_len, _BLOCK_SIZE, torch.device("cpu"))
    limits = DrafterLimits(
        max_rows=config.max_rows,
        max_model_len=config.max_model_len,
        max_frame_tokens=config.max_frame_tokens,
        max_branch_len=config.max_branch_len,
    )
    return DrafterCore(method, config.method, RowPool(rows), limits, model)
