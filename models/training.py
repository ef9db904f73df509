"""The training loop, limited by time: the learning rate follows the elapsed share of the allowed minutes."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from models.demo_model import DemoModel

# inputs and labels [rows, length] int64 -> scalar loss
LossFunction = Callable[[Tensor, Tensor], Tensor]

_TEACHER_TEMPERATURE = 0.8
_HARD_LABEL_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class TrainSettings:
    minutes: float
    peak_lr: float
    rows: int
    length: int
    weight_decay: float = 0.1
    warmup_share: float = 0.03
    final_lr_share: float = 0.01
    log_every: int = 50
    validate_seconds: float = 60.0
    compile: bool = True


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run saw; `seconds` leaves compilation out, `epochs` counts passes over the files' own tokens."""

    device: str
    seconds: float
    steps: int
    tokens: int
    tokens_per_s: float
    train_loss: float
    heldout_loss: float


class TokenStream:
    """Windows of a token stream [num_tokens] int16: every pass covers it once, in random order, from a random shift."""

    def __init__(self, tokens: Tensor, rows: int, length: int, seed: int):
        if len(tokens) < 2 * length + 1:
            raise ValueError(f"tokens: {len(tokens)} tokens; expected at least {2 * length + 1}")
        self.tokens = tokens
        self._rows = rows
        self._length = length
        self._generator = torch.Generator().manual_seed(seed)
        self._steps = torch.arange(length + 1, device=tokens.device)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels [rows, length] int64, without end."""
        starts = torch.empty(0, dtype=torch.int64)
        while True:
            while len(starts) < self._rows:
                shift = int(torch.randint(self._length, (), generator=self._generator))
                num_windows = (len(self.tokens) - 1 - shift) // self._length
                order = torch.randperm(num_windows, generator=self._generator)
                starts = torch.cat((starts, shift + self._length * order))
            rows, starts = starts[: self._rows], starts[self._rows :]
            offsets = rows.to(self.tokens.device, non_blocking=True)
            windows = self.tokens[offsets[:, None] + self._steps].long()  # [rows, length + 1]
            yield windows[:, :-1], windows[:, 1:]


def language_loss(model: DemoModel) -> LossFunction:
    """Mean cross entropy, in nats per token."""

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1).float(), labels.flatten())

    return loss


def distillation_loss(model: DemoModel, teacher: DemoModel) -> LossFunction:
    """Cross entropy with the teacher's distribution, and a little with the text itself.

    Both distributions are taken at temperature 0.8: a draft token counts only if it equals the target's choice, and
    that choice is made greedily or at a temperature below 1, where the teacher's first few tokens carry the weight.
    """

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            goal = torch.softmax(teacher(inputs).flatten(0, 1).float() / _TEACHER_TEMPERATURE, dim=-1)
        logits = model(inputs).flatten(0, 1).float()  # [rows * length, vocab]
        soft = -(goal * torch.log_softmax(logits / _TEACHER_TEMPERATURE, dim=-1)).sum(-1).mean()
        return (1 - _HARD_LABEL_SHARE) * soft + _HARD_LABEL_SHARE * F.cross_entropy(logits, labels.flatten())

    return loss


def train_model(
    name: str,
    model: DemoModel,
    loss_function: LossFunction,
    batches: Iterator[tuple[Tensor, Tensor]],
    heldout: Tensor,
    settings: TrainSettings,
    checkpoint: Path,
) -> TrainResult:
    """Train in place with AdamW until the minutes are over; `heldout` is a stream [num_tokens] int16."""
    device = next(model.parameters()).device
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.peak_lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    compiled = torch.compile(loss_function) if settings.compile and device.type == "cuda" else loss_function
    model.train()
    # One pass before the clock starts, so that compilation costs no training time.
    before = time.monotonic()
    with _autocast(device):
        first = compiled(*next(batches))
    first.backward()
    optimizer.zero_grad(set_to_none=True)
    print(f"[{name}] {model.num_parameters:,} parameters, first loss {first.item():.3f}, ready in "
          f"{time.monotonic() - before:.1f} s", flush=True)  # fmt: skip

    limit = settings.minutes * 60
    start = time.monotonic()
    next_validation = settings.validate_seconds
    step, elapsed, train_loss = 0, 0.0, math.nan
    losses = torch.zeros((), device=device)
    while elapsed < limit:
        for group in optimizer.param_groups:
            group["lr"] = settings.peak_lr * _lr_share(elapsed / limit, settings)
        with _autocast(device):
            loss = compiled(*next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses += loss.detach()
        step += 1
        if step % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # the clock must not run ahead of the device
        elapsed = time.monotonic() - start
        if step % settings.log_every == 0 or elapsed >= limit:
            num_logged = (step - 1) % settings.log_every + 1
            train_loss = losses.item() / num_logged
            losses.zero_()
            if not math.isfinite(train_loss):
                raise FloatingPointError(f"{name}: training loss {train_loss} at step {step}")
            rate = step * settings.rows * settings.length / elapsed
            lr = optimizer.param_groups[0]["lr"]
            print(f"[{name} {elapsed:6.1f}/{limit:.0f} s] step {step} loss {train_loss:.4f} lr {lr:.2e} "
                  f"{rate / 1e3:,.0f}k tokens/s", flush=True)  # fmt: skip
        if elapsed >= next_validation:
            next_validation += settings.validate_seconds
            print(f"[{name} {elapsed:6.1f}/{limit:.0f} s] held-out {validate(model, heldout, 32):.4f}", flush=True)
            torch.save(model.state_dict(), checkpoint)
    seconds = time.monotonic() - start
    model.eval()
    tokens = step * settings.rows * settings.length
    name_of_device = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    heldout_loss = validate(model, heldout, None)
    print(f"[{name}] done: {step} steps, {tokens:,} tokens, held-out {heldout_loss:.4f}", flush=True)
    return TrainResult(name_of_device, seconds, step, tokens, tokens / seconds, train_loss, heldout_loss)


@torch.no_grad()
def validate(model: DemoModel, stream: Tensor, max_windows: int | None) -> float:
    """Mean nats per token over whole windows of a stream [num_tokens] int16."""
    length = min(model.shape.max_position_embeddings, len(stream) - 1)
    num_windows = (len(stream) - 1) // length
    num_windows = min(num_windows, max_windows or num_windows)
    total = 0.0
    for index in range(num_windows):
        window = stream[index * length : (index + 1) * length + 1].long()
        with _autocast(stream.device):
            total += language_loss(model)(window[None, :-1], window[None, 1:]).item()
    return total / num_windows


def _lr_share(progress: float, settings: TrainSettings) -> float:
    if progress < settings.warmup_share:
        return max(progress, 1e-3) / settings.warmup_share
    decayed = (progress - settings.warmup_share) / (1 - settings.warmup_share)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, decayed)))
    return settings.final_lr_share + (1 - settings.final_lr_share) * cosine


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
