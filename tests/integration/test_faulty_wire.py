"""A real engine and a real drafter with a bad wire between them: the tokens are those without drafts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.draft_codec import MAX_FRAME_ROWS
from common.protos.outrider.v1 import drafter_pb2 as pb
from outrider.llm import LLM
from tests.drafter_process import DrafterProcess, running_drafter
from tests.remote_llm import MAX_MODEL_LEN, MIXED, OPTIONS, connected, drafts_of, tokens, wait_until_idle
from tests.tiny_models import make_model, make_tokenizer

METHOD = "/outrider.v1.Drafter/Session"
OVERSIZED_UP = b"\0" * (1 << 23)
OVERSIZED_DOWN = pb.DrafterFrame(branches=pb.BranchBatch(row=b"\0" * 4 * (MAX_FRAME_ROWS + 1))).SerializeToString()


@dataclass
class Wire:
    """Passes the frames of sessions on, with one kind of fault; both hellos pass whole.

    fault: garbled, stale, duplicated, reordered, lost, oversized.
    """

    fault: str
    target: str
    num_up: int = 0
    """Faults on the way to the drafter."""
    num_down: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    _server: Any = None
    address: str = ""

    def __enter__(self) -> Wire:
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1)])
        handler = grpc.stream_stream_rpc_method_handler(self._session)
        service, method = METHOD.strip("/").split("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait(10)

    def _session(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with grpc.insecure_channel(self.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call: Any = channel.stream_stream(METHOD)(self._up(frames))
            context.add_callback(call.cancel)
            try:
                yield from self._down(call)
            except grpc.RpcError:
                context.abort(call.code(), call.details())

    def _up(self, frames: Iterator[bytes]) -> Iterator[bytes]:
        try:
            for sent in self._spoil(frames, OVERSIZED_UP):
                if isinstance(sent, bytes):
                    yield sent
                else:
                    self.num_up += 1
        except grpc.RpcError:  # the engine has left
            return

    def _down(self, frames: Iterable[bytes]) -> Iterator[bytes]:
        for sent in self._spoil(frames, OVERSIZED_DOWN):
            if isinstance(sent, bytes):
                yield sent
            else:
                self.num_down += 1

    def _spoil(self, frames: Iterable[bytes], oversized: bytes) -> Iterator[bytes | None]:
        """The frames as they arrive; None stands for the fault that comes next."""
        held: bytes | None = None
        old: list[bytes] = []
        for number, frame in enumerate(frames):
            if number == 0 or self._random.random() > 0.15:
                yield frame
                if held is not None:
                    yield held
                    held = None
            elif self.fault == "reordered" and held is None:
                yield None
                held = frame  # until the next one has overtaken it
            else:
                yield None
                yield from self._faulty(frame, old, oversized)
            if number:
                old = [*old[-20:], frame]

    def _faulty(self, frame: bytes, old: list[bytes], oversized: bytes) -> Iterator[bytes]:
        if self.fault == "garbled":
            place = self._random.randrange(len(frame))
            yield frame[:place] + bytes([frame[place] ^ (1 + self._random.randrange(255))]) + frame[place + 1 :]
        elif self.fault == "stale":
            yield frame
            if old:
                yield self._random.choice(old)
        elif self.fault == "duplicated":
            yield frame
            yield frame
        elif self.fault == "oversized":
            yield oversized
        elif self.fault == "reordered":
            yield frame


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=MAX_MODEL_LEN)
    return make_tokenizer(directory)


@pytest.fixture(scope="module")
def drafter() -> Iterator[DrafterProcess]:
    with running_drafter("--shm-dir", "") as process:
        yield process


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with LLM(str(model), drafter="none", **OPTIONS) as llm:
        return tokens(llm, MIXED)


@pytest.mark.parametrize("fault", ["garbled", "stale", "duplicated", "reordered", "lost", "oversized"])
def test_same_tokens_over_a_bad_wire(
    model: Path, drafter: DrafterProcess, expected: list[list[int]], fault: str
) -> None:
    with Wire(fault, drafter.address) as wire, connected(model, wire.address, draft_deadline=10.0) as llm:
        (stats,) = drafts_of(llm).stats.drafters
        least = 1 if fault == "oversized" else 10  # such a frame ends the session
        for _ in range(20):
            assert tokens(llm, MIXED) == expected
            if min(wire.num_up, wire.num_down) >= least and stats.num_accepted_tokens >= 50:
                break
        else:
            raise AssertionError(f"{wire.num_up} and {wire.num_down} faults, {stats}")
    wait_until_idle(drafter.address)
    assert "Traceback" not in drafter.process.error_text
