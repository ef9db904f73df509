"""Wiring of the drafts that come from drafters."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace

import torch

from common.config import EngineConfig
from common.draft_exchange import ModelIdentity, VerifierHello
from model_executor.drafting import DraftMethod
from model_executor.landing_tensors import make_landing_tensors
from verifier_svc.drafts.device_drafts import RemoteDeviceDrafts
from verifier_svc.drafts.device_landing import DeviceLanding, StagedWrites
from verifier_svc.drafts.exchange import DraftExchange
from verifier_svc.drafts.landing import Landing, LandingBuffer
from verifier_svc.drafts.remote_drafts import RemoteDrafts
from verifier_svc.drafts.transport import DraftTransport

BRANCH_BUDGET = 4
"""Branches of a row that a drafter may send at once, and that are kept."""


def build_verifier_hello(
    config: EngineConfig, model: ModelIdentity, vocab_size: int, max_model_len: int, num_steps_ahead: int = 0
) -> VerifierHello:
    """What a verifier tells its drafters.

    Branches of two steps: one that is a step late still fills a step. And of `num_steps_ahead` more, for a loop that
    hands over so many steps before it knows, and can tell, what the one before has committed.
    """
    return VerifierHello(
        verifier_id=f"{socket.gethostname()}/{os.getpid()}",
        model=replace(model, vocab_size=vocab_size),
        max_model_len=max_model_len,
        max_rows=config.max_num_seqs,
        branch_budget=BRANCH_BUDGET,
        branch_len=(2 + num_steps_ahead) * (config.num_speculative_tokens + 1),
    )


def build_remote_drafts(
    transports: Sequence[DraftTransport],
    hello: VerifierHello,
    num_speculative_tokens: int,
    fallback: DraftMethod,
    deadline_ms: float,
    device: torch.device,
) -> RemoteDrafts:
    """A draft method on these transports, which it closes.

    Args:
        transports: one for each drafter, made with `hello`.
        hello: what the drafters were told.
        num_speculative_tokens: K, at most this many draft tokens a row and step.
        fallback: drafts for rows without a usable branch.
        deadline_ms: how long a step waits at most.
        device: where the row state lives.
    """
    landing = LandingBuffer(hello.max_rows, hello.branch_budget, hello.branch_len, num_speculative_tokens, device)
    return RemoteDrafts(_exchange(transports, hello, landing, deadline_ms), landing, fallback)


def build_remote_device_drafts(
    transports: Sequence[DraftTransport],
    hello: VerifierHello,
    deadline_ms: float,
    device: torch.device,
    writes: StagedWrites,
) -> RemoteDeviceDrafts:
    """Drafts on these transports, which it closes, for steps that choose their drafts on the device.

    Args:
        transports: one for each drafter, made with `hello`.
        hello: what the drafters were told.
        deadline_ms: how long a step waits at most.
        device: where the row state lives.
        writes: brings branches there before a step.
    """
    landing = DeviceLanding(make_landing_tensors(hello.max_rows, hello.branch_budget, hello.branch_len, device), writes)
    return RemoteDeviceDrafts(_exchange(transports, hello, landing, deadline_ms), landing)


def _exchange(
    transports: Sequence[DraftTransport], hello: VerifierHello, landing: Landing, deadline_ms: float
) -> DraftExchange:
    return DraftExchange(transports, landing, hello.max_rows, hello.model.vocab_size, deadline_ms / 1e3)
