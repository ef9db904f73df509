"""The process that drafts: a loop that takes all messages at hand, drafts once, and answers."""

from __future__ import annotations

import select
import signal
import socket

import torch

from common.errors import OutriderError
from common.logging import configure_logging, get_logger
from drafter_svc.builder import build_core
from drafter_svc.config import DrafterConfig
from drafter_svc.frame_service import FrameService
from drafter_svc.worker_link import Kind, Message, pack, unpack_all
from model_executor.drafting import DraftMethod

_READ_BYTES = 1 << 20
_MAX_BATCH_BYTES = 16 << 20
"""Bytes of messages that are answered together at most."""

logger = get_logger(__name__)


def run_worker(sock: socket.socket, config: DrafterConfig, log_level: str, method: DraftMethod | None = None) -> None:
    """Draft for whoever is at the other end of `sock`, until it is closed; with `method`, if one is given."""
    # A Ctrl-C goes to the whole process group; the RPC process ends us by closing the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(log_level)
    torch.set_num_threads(config.num_threads)
    try:
        core = build_core(config, method)
    except OutriderError as error:
        sock.sendall(pack(Kind.FAILED, payload=f"{error.status}\n{error}".encode()))
        return
    sock.sendall(pack(Kind.READY, payload=core.hello.incarnation_id.encode()))
    try:
        serve(sock, FrameService(core))
    finally:
        core.close()


def serve(sock: socket.socket, service: FrameService) -> None:
    """Answer messages until the other end is closed."""
    buffer = bytearray()
    while (messages := _receive(sock, buffer)) is not None:
        out = service.handle(messages)
        if out:
            try:
                sock.sendall(b"".join(out))
            except OSError:
                return


def _receive(sock: socket.socket, buffer: bytearray) -> list[Message] | None:
    """At least one message, and whatever else is there already; None at the end."""
    messages: list[Message] = []
    while not messages or (len(buffer) < _MAX_BATCH_BYTES and _is_readable(sock)):
        try:
            data = sock.recv(_READ_BYTES)
        except OSError:
            data = b""
        if not data:
            return messages or None
        buffer += data
        messages += unpack_all(buffer)
    return messages


def _is_readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])
