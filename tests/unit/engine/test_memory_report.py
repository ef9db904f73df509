"""Where a GPU's memory went, and the bound of the token rows."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console

from common.config import BLOCK_SIZE, EngineConfig
from common.errors import InvalidArgumentError
from common.logging import configure_logging, get_logger
from model_executor.row_state import RowState
from verifier_svc.engine.memory_report import MemoryUse, describe_memory, format_bytes, log_memory, tensor_bytes
from verifier_svc.engine.token_row_memory import check_token_row_memory, token_row_bytes

GIB = 1 << 30
USE = MemoryUse(
    device="cuda:0 (Test GPU)",
    total_bytes=100 * GIB,
    others_bytes=GIB,
    weight_bytes=15 * GIB,
    step_bytes=2 * GIB,
    graph_bytes=GIB // 2,
    token_row_bytes=32 << 20,
    sampling_bytes=3 << 20,
    kv_cache_bytes=70 * GIB,
    num_kv_blocks=1001,
)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    configure_logging("info", "json", stream)
    yield stream
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)


def test_one_record_says_where_all_of_it_went(log: io.StringIO) -> None:
    log_memory(USE, get_logger("test"))
    (line,) = log.getvalue().splitlines()
    record = json.loads(line)
    assert record["event"] == "device memory"
    assert record["num_kv_tokens"] == 1000 * BLOCK_SIZE
    parts = [value for name, value in record.items() if name.endswith("_bytes") and name != "total_bytes"]
    assert len(parts) == 8
    assert sum(parts) == record["total_bytes"] == 100 * GIB


def test_the_table_has_a_line_for_each_part() -> None:
    stream = io.StringIO()
    Console(file=stream, width=120).print(describe_memory(USE))
    lines = {line.split("│")[1].strip(): line for line in stream.getvalue().splitlines() if "│" in line}
    assert "15.0 GiB" in lines["weights"]
    assert "15.0%" in lines["weights"]
    assert "32.0 MiB" in lines["token rows"]
    assert "16,000 tokens in 1,000 blocks of 16" in lines["KV cache"]
    assert "11.5 GiB" in lines["free"]
    assert "100.0 GiB" in lines["total"]


def test_sizes_are_readable() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 << 19, 5 << 30, -(1 << 30))] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "5.0 GiB",
        "-1.0 GiB",
    ]


def test_the_token_rows_are_counted_as_they_are() -> None:
    rows = RowState(7, 100, BLOCK_SIZE, torch.device("cpu"))
    assert token_row_bytes(7, 100) == tensor_bytes([rows.token_ids]) == 2800
    assert tensor_bytes([rows.token_ids, rows.finished, None]) == 2800 + 7
    # Views share their storage.
    assert tensor_bytes([rows.token_ids, rows.token_ids[2:], "no tensor"]) == 2800


def test_token_rows_beyond_their_bound_are_refused() -> None:
    default = EngineConfig(model="m").max_token_row_memory
    assert default == GIB
    assert check_token_row_memory(default, 2048, 131072) == GIB
    with pytest.raises(InvalidArgumentError) as caught:
        check_token_row_memory(default, 2049, 131072)
    assert caught.value.field == "max_token_row_memory"
    assert caught.value.value == GIB
    assert str(2049 * 131072 * 4) in caught.value.expected
    assert "2049 rows (max_num_seqs) of 131072 tokens (max_model_len)" in caught.value.expected
