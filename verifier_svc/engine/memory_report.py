"""What takes the memory of a GPU when an engine has started: as fields of a log record, and as a table for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from common.config import BLOCK_SIZE
from common.logging import Logger


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one GPU, measured while an engine starts."""

    device: str
    total_bytes: int
    others_bytes: int
    """In use before the weights: other processes, and the CUDA context of this one."""
    weight_bytes: int
    step_bytes: int
    """Activations and buffers of steps."""
    graph_bytes: int
    """What the captured graphs hold beyond the buffers of steps."""
    token_row_bytes: int
    """Tokens of all rows, where n-grams are looked up; bounded by `max_token_row_memory`."""
    sampling_bytes: int
    """Sampling parameters and all other state of rows."""
    kv_cache_bytes: int
    num_kv_blocks: int
    """The dummy block included."""

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV fits."""
        return (self.num_kv_blocks - 1) * BLOCK_SIZE

    @property
    def free_bytes(self) -> int:
        """Nobody's: below zero where what was counted overlaps."""
        used = self.others_bytes + self.weight_bytes + self.step_bytes + self.graph_bytes
        return self.total_bytes - used - self.token_row_bytes - self.sampling_bytes - self.kv_cache_bytes


def describe_memory(use: MemoryUse) -> Table:
    """A line for each part, with its share of the GPU."""
    table = Table(title=f"memory of {use.device}", title_justify="left")
    table.add_column("")
    table.add_column("size", justify="right")
    table.add_column("share", justify="right")
    table.add_column("what it is for")
    num_blocks = use.num_kv_blocks - 1
    for name, num_bytes, purpose in (
        ("weights", use.weight_bytes, ""),
        ("steps", use.step_bytes, "activations and buffers"),
        ("graphs", use.graph_bytes, "captured steps"),
        ("token rows", use.token_row_bytes, "committed tokens, for n-grams (max_token_row_memory)"),
        ("sampling", use.sampling_bytes, "parameters and lengths of rows"),
        ("KV cache", use.kv_cache_bytes, f"{use.num_kv_tokens:,} tokens in {num_blocks:,} blocks of {BLOCK_SIZE}"),
        ("others", use.others_bytes, "in use before the start, and the driver's own"),
        ("free", use.free_bytes, "left by gpu_memory_utilization, or by a KV cache that holds all rows"),
    ):
        table.add_row(name, format_bytes(num_bytes), f"{num_bytes / use.total_bytes:.1%}", purpose)
    table.add_section()
    table.add_row("total", format_bytes(use.total_bytes), "100.0%", "")
    return table


def log_memory(use: MemoryUse, logger: Logger) -> None:
    """One record with all parts, in bytes."""
    logger.info("device memory", **asdict(use), num_kv_tokens=use.num_kv_tokens, free_bytes=use.free_bytes)


def show_memory(use: MemoryUse) -> None:
    """The table on standard error, if that is a terminal: for services. A log that is a file has the record."""
    if sys.stderr.isatty():
        Console(stderr=True).print(describe_memory(use))


def tensor_bytes(tensors: Iterable[object]) -> int:
    """Bytes of the tensors among these values, such as `vars(rows).values()`; storage that several share once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())


def format_bytes(num_bytes: int) -> str:
    """Such as 15.0 GiB."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
