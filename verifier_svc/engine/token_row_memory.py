"""The bound of the token rows: committed tokens and drafts of every row, where n-grams are looked up."""

from __future__ import annotations

from common.errors import InvalidArgumentError

_TOKEN_BYTES = 4  # `RowState.token_ids` is int32


def token_row_bytes(num_rows: int, max_model_len: int) -> int:
    """Bytes of `RowState.token_ids`, [num_rows, max_model_len] int32."""
    return num_rows * max_model_len * _TOKEN_BYTES


def check_token_row_memory(limit_bytes: int, num_rows: int, max_model_len: int) -> int:
    """Bytes of the token rows, if they may take that much.

    Args:
        limit_bytes: `EngineConfig.max_token_row_memory`.
        num_rows: R, rows of the row state.
        max_model_len: tokens of a row.

    Raises:
        InvalidArgumentError: they take more.
    """
    num_bytes = token_row_bytes(num_rows, max_model_len)
    if num_bytes > limit_bytes:
        expected = (
            f"at least {num_bytes} bytes: {num_rows} rows (max_num_seqs) of {max_model_len} tokens (max_model_len), "
            f"{_TOKEN_BYTES} bytes a token; or fewer or shorter rows"
        )
        raise InvalidArgumentError("max_token_row_memory", limit_bytes, expected)
    return num_bytes
