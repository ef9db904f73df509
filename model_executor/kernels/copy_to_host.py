"""Some words of the device written to pinned memory of the host.

A copy engine takes 4 us to start between two kernels, a kernel 1 us. Grid: one program. Bytes: the words, twice.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])  # one kernel for outcomes of any length
def _copy_to_host_kernel(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(target_ptr + place, tl.load(source_ptr + place, mask=place < count), mask=place < count)


def copy_to_host(source: Tensor, target: Tensor) -> None:
    """target[: source.numel()] = source, seen by the host once an event recorded behind this has passed.

    Args:
        source: contiguous, on the device.
        target: one dimension, of the same type, pinned.
    """
    _copy_to_host_kernel[(1,)](source, target, source.numel(), BLOCK=_BLOCK)
