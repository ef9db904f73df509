"""The sampler's rules once more, slowly and in plain Python and float64, and a toy engine that decodes with them.

Written from the definitions and sharing no code with the sampler, so that the two can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.sampling_params import SamplingParams
from common.types import Request
from model_executor.row_state import RowState
from verifier_svc.sampling.commit import match_and_commit
from verifier_svc.sampling.sampler import Sampler
from verifier_svc.sampling.state import SamplingState

CPU = torch.device("cpu")


def make_request(
    prompt: Sequence[int] = (0,),
    seed: int = 0,
    max_len: int = 64,
    stop: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    **params: Any,
) -> Request:
    words = tuple(tuple(word) for word in bad_words)
    return Request("request", list(prompt), SamplingParams(**params), seed, max_len, tuple(stop), words)


def processed_logits(logits: Sequence[float], prefix: Sequence[int], request: Request) -> list[float]:
    """Logits before temperature, for the token after `prefix` (prompt and output)."""
    params = request.params
    prompt_len = len(request.prompt_token_ids)
    output = list(prefix[prompt_len:])
    values = [float(value) for value in logits]
    for token in set(prefix):
        value = values[token]
        values[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in set(output):
        values[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    for word in request.bad_words:
        *head, last = word
        if list(prefix[len(prefix) - len(head) :]) == head and len(prefix) >= len(head):
            values[last] = -math.inf
    if len(output) < params.min_tokens:
        for token in request.stop_token_ids:
            values[token] = -math.inf
    return values


def kept_tokens(scaled: Sequence[float], params: SamplingParams) -> set[int]:
    """Tokens that min_p, top_k and top_p leave, of logits already divided by the temperature."""
    best = max(scaled)
    kept = [t for t, value in enumerate(scaled) if value > -math.inf]
    kept = [t for t in kept if math.exp(scaled[t] - best) >= params.min_p]
    kept.sort(key=lambda t: (-scaled[t], t))
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total = sum(math.exp(scaled[t] - best) for t in kept)
    mass = 0.0
    for count, token in enumerate(kept, start=1):
        mass += math.exp(scaled[token] - best) / total
        if params.top_p < 1.0 and mass >= params.top_p:
            return set(kept[:count])
    return set(kept)


def distribution(processed: Sequence[float], params: SamplingParams) -> NDArray[np.float64]:
    """Probability of every token, [V]."""
    if params.is_greedy:
        probs = np.zeros(len(processed))
        probs[int(np.argmax(processed))] = 1.0
        return probs
    scaled = [value / params.temperature for value in processed]
    best = max(scaled)
    kept = kept_tokens(scaled, params)
    probs = np.array([math.exp(value - best) if t in kept else 0.0 for t, value in enumerate(scaled)])
    return probs / probs.sum()


class ToyEngine:
    """Decodes rows of a bigram target (logits of the next token = table[last token]) through the real sampler."""

    def __init__(
        self, table: Tensor, requests: Sequence[Request], num_draft_tokens: int, max_model_len: int = 64
    ) -> None:
        num_rows = len(requests)
        self.table = table  # [V, V] float32
        self.num_draft_tokens = num_draft_tokens
        self.rows = RowState(num_rows, max_model_len, 16, CPU)
        self.state = SamplingState(num_rows, table.shape[0], CPU)
        self.sampler = Sampler(self.state)
        self.finished = torch.zeros(num_rows, dtype=torch.int64)
        self.num_steps = 0
        for row, request in enumerate(requests):
            prompt = request.prompt_token_ids
            self.rows.set_row(row, prompt, len(prompt), 0, request.max_len)
            self.state.set_row(row, request)

    def step(self, propose: Callable[[RowState, Tensor], Tensor] | None) -> None:
        """One verify step of every unfinished row. `propose` returns draft tokens [B, K], -1 from where it abstains."""
        rows, width = self.rows, self.num_draft_tokens + 1
        idx = (~rows.finished).nonzero().squeeze(-1)  # [B]
        base = rows.committed_len[idx]
        step = torch.arange(width)
        drafts = torch.full((len(idx), width - 1), -1) if propose is None else propose(rows, idx)
        room = (rows.max_len[idx] - base - 1).unsqueeze(-1)
        drafted = (drafts >= 0).cumprod(-1).bool() & (step[:-1] < room)  # [B, K]
        draft_len = drafted.sum(-1)
        entry, column = drafted.nonzero().unbind(-1)
        rows.token_ids[idx[entry], base[entry] + column] = drafts[drafted].int()

        verified = step <= draft_len.unsqueeze(-1)  # [B, K + 1]
        entry, column = verified.nonzero().unbind(-1)
        row, position = idx[entry], base[entry] + column
        logits = self.table[rows.token_ids[row, position - 1].long()]  # [T, V]
        sampled = torch.full((len(idx), width), -1)
        sampled[verified] = self.sampler.sample(logits, row, position, rows.token_ids, rows.prompt_len)
        samples = torch.ones(len(idx), dtype=torch.bool)
        result = match_and_commit(rows, self.state, idx, draft_len, sampled, samples)
        self.finished[idx] = result.finished
        self.num_steps += 1

    def run(self, propose: Callable[[RowState, Tensor], Tensor] | None) -> list[list[int]]:
        """Step until every row is finished; the output tokens of each row."""
        while not bool(self.rows.finished.all()):
            self.step(propose)
        rows = self.rows
        lengths = zip(rows.prompt_len.tolist(), rows.committed_len.tolist(), strict=True)
        return [rows.token_ids[row, start:end].tolist() for row, (start, end) in enumerate(lengths)]
