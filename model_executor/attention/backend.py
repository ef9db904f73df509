"""The seam between a decoder and whatever computes attention over paged KV."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from model_executor.forward_batch import ForwardBatch
from model_executor.kv_cache import LayerKV

MetadataT = TypeVar("MetadataT")


class AttentionBackend(Protocol[MetadataT]):
    """Causal grouped-query attention of a ragged batch over paged KV."""

    def prepare(self, batch: ForwardBatch) -> MetadataT:
        """What `forward` needs to know about `batch`: computed once a step, shared by all layers."""
        ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, layer_kv: LayerKV, metadata: MetadataT) -> Tensor:
        """Write the KV of all query tokens, then attend.

        The writes of the whole batch come before the first read: another request of the same batch may share a block
        that is written in this very step.

        Args:
            query: [num_tokens, num_heads, head_dim], rotated.
            key: [num_tokens, num_kv_heads, head_dim], rotated.
            value: [num_tokens, num_kv_heads, head_dim].
            layer_kv: cache of this layer.
            metadata: of `prepare` for this batch.

        Returns:
            [num_tokens, num_heads, head_dim], of the query's dtype. Query token j of a request of query_len q and
            seq_len s sees the first s - q + j + 1 tokens of it. Tokens that belong to no request (padding) come out as
            zeros.
        """
        ...
