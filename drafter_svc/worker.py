"""The process that drafts: a loop that takes all messages at hand, drafts once, and answers."""

from __future__ import annotations

import select
import signal
import socket
from pathlib import Path

import torch

from common.errors import OutriderError
from common.logging import configure_logging, get_logger
from common.shm.channel import SharedMemoryError
from drafter_svc.builder import build_core
from drafter_svc.config import DrafterConfig
from drafter_svc.frame_service import FrameService
from drafter_svc.shared_memory import SharedMemoryLinks
from drafter_svc.worker_link import Kind, Message, pack, unpack_all
from model_executor.drafting import DraftMethod

_READ_BYTES = 1 << 16
_MAX_BATCH_BYTES = 16 << 20
"""Bytes of messages that are answered together at most."""
_MAX_READS = 64
"""Looks for more before what has come is answered."""

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
    links = _open_shared_memory(config)
    sock.sendall(pack(Kind.READY, payload=core.hello.incarnation_id.encode()))
    try:
        serve(sock, FrameService(core, links), links)
    finally:
        if links is not None:
            links.close()
        core.close()


def serve(sock: socket.socket, service: FrameService, links: SharedMemoryLinks | None = None) -> None:
    """Answer messages until the other end is closed."""
    buffer = bytearray()
    while (messages := _receive(sock, buffer, links)) is not None:
        out = service.handle(messages)
        if out:
            try:
                sock.sendall(b"".join(out))
            except OSError:
                return


def _open_shared_memory(config: DrafterConfig) -> SharedMemoryLinks | None:
    if not config.shm_dir:
        return None
    try:
        return SharedMemoryLinks(Path(config.shm_dir))
    except SharedMemoryError as error:
        logger.warning("no shared memory, gRPC alone", reason=str(error))
        return None


def _receive(sock: socket.socket, buffer: bytearray, links: SharedMemoryLinks | None) -> list[Message] | None:
    """Messages, and whatever else is there already; None at the end. A peer that never stops holds nobody up."""
    messages: list[Message] = []
    num_bytes = 0
    for _ in range(_MAX_READS):
        if num_bytes >= _MAX_BATCH_BYTES:
            break
        channels = [] if links is None else links.channels
        ready = _ready([sock.fileno(), *(channel.fileno() for channel in channels)], wait=not messages)
        if not ready:
            break
        if links is not None and channels:
            for channel in channels:
                if channel.fileno() in ready:
                    channel.silence()
            arrived = links.receive()
            num_bytes += sum(len(message.payload) for message in arrived)
            messages += arrived
        if sock.fileno() in ready:
            try:
                data = sock.recv(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                return messages or None
            buffer += data
            num_bytes += len(data)
            messages += unpack_all(buffer)
    return messages


def _ready(fds: list[int], wait: bool) -> set[int]:
    """Those that can be read. poll() and not select(), which knows no more than 1024."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if wait else 0)}
