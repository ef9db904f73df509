"""The engine process, rank 0: requests of the front in, one report a step out."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from common.engine_extensions import StepCounts
from common.errors import EngineClosedError, OutriderError
from common.logging import configure_logging, get_logger
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.link import EngineLink, FrontGoneError
from verifier_svc.messages import (
    AbortRequest,
    AddRequest,
    Admitted,
    EngineLoad,
    ExchangeCounts,
    Failed,
    FlushCache,
    FlushResult,
    OutputUpdate,
    Ready,
    Rejected,
    ReplayCounts,
    ServedFacts,
    Start,
    ToEngine,
)
from verifier_svc.orchestrator.step import Event

EXIT_OK, EXIT_FAILED, EXIT_FRONT_GONE = 0, 1, 3

_PR_SET_PDEATHSIG = 1

_EXCHANGE_INTERVAL_S = 0.25
"""How often the counts of drafters go to the front; also without work, since a drafter may come and go meanwhile."""


_REPLAYS_INTERVAL_S = 0.25
"""How often the counts of captured steps go to the front while there is work."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """What an entry point hands over: it knows which services to wire, this package does not."""

    engine: Engine
    served: ServedFacts
    exchange_counts: Callable[[], ExchangeCounts] | None = None
    """Of the drafters; None where there are none."""
    replay_counts: Callable[[], ReplayCounts] | None = None
    """Of the captured steps; None where steps are no graphs."""


class EngineProcess:
    """The loop: take what the front has sent, run a step, report it. One thread owns all of it."""

    def __init__(
        self,
        engine: Engine,
        link: EngineLink,
        exchange_counts: Callable[[], ExchangeCounts] | None = None,
        replay_counts: Callable[[], ReplayCounts] | None = None,
    ) -> None:
        self._engine = engine
        self._link = link
        self._exchange_counts = exchange_counts
        self._exchange_due_s = 0.0
        self._replay_counts = replay_counts
        self._replays_due_s = 0.0
        self._added_s: dict[str, float] = {}  # of requests without a row, by id
        self._admitted: list[Admitted] = []
        engine.orchestrator.on_admitted = self._note_admitted
        self._request_ids: dict[int, str] = {}
        self._keys: dict[str, int] = {}
        self._rejected: list[Rejected] = []
        self._flushed: list[FlushResult] = []
        self._num_steps = 0
        self._logger = get_logger(__name__)

    def run(self) -> None:
        """Until the front says stop.

        Raises:
            EngineClosedError: a step has failed.
            FrontGoneError: the front is gone.
        """
        engine, link = self._engine, self._link
        idle_s = None if self._exchange_counts is None else _EXCHANGE_INTERVAL_S
        if self._replay_counts is not None:
            link.report(self._load(), [], replays=self._replays())  # the graphs there are, before any has run
        while True:
            for message in link.receive(0 if engine.has_work else idle_s):
                if not self._take(message):
                    return
            events: list[Event] = []
            if engine.has_work:
                events = engine.step()
                self._num_steps += 1
            link.report(
                self._load(),
                self._updates(events),
                self._rejected,
                self._flushed,
                self._admitted,
                self._exchange(),
                self._replays(),
            )
            self._rejected, self._flushed, self._admitted = [], [], []

    def _take(self, message: ToEngine) -> bool:
        """False: the front says stop."""
        if isinstance(message, AddRequest):
            self._add(message)
        elif isinstance(message, AbortRequest):
            request_id = self._request_ids.pop(message.key, None)
            if request_id is not None:
                del self._keys[request_id]
                self._added_s.pop(request_id, None)
                self._engine.abort(request_id)
            self._link.forget(message.key)
        elif isinstance(message, FlushCache):
            is_idle = not self._engine.has_work
            if is_idle:
                self._engine.orchestrator.pool.reset_cache()
            self._flushed.append(FlushResult(message.call, is_idle))
        else:
            return False
        return True

    def _add(self, message: AddRequest) -> None:
        """An error is the answer to this request, and no concern of the others."""
        try:
            self._engine.add(message.to_request())
        except EngineClosedError:
            raise
        except OutriderError as error:
            self._rejected.append(Rejected(message.key, error.status, str(error)))
        except Exception as error:
            self._logger.exception("a request could not be added", request_id=message.request_id)
            self._rejected.append(Rejected(message.key, "INTERNAL", f"internal error: {type(error).__name__}"))
        else:
            self._request_ids[message.key] = message.request_id
            self._keys[message.request_id] = message.key
            self._added_s[message.request_id] = time.monotonic()
            self._logger.debug("request added", request_id=message.request_id, key=message.key)

    def _note_admitted(self, request_id: str) -> None:
        added_s = self._added_s.pop(request_id, None)
        key = self._keys.get(request_id)
        if added_s is not None and key is not None:
            self._admitted.append(Admitted(key, time.monotonic() - added_s))

    def _exchange(self) -> ExchangeCounts | None:
        """The counts of drafters, if they are due."""
        if self._exchange_counts is None:
            return None
        now = time.monotonic()
        if now < self._exchange_due_s:
            return None
        self._exchange_due_s = now + _EXCHANGE_INTERVAL_S
        return self._exchange_counts()

    def _replays(self) -> ReplayCounts | None:
        """The counts of captured steps, if they are due; the last step of all is always counted."""
        if self._replay_counts is None:
            return None
        now = time.monotonic()
        if now < self._replays_due_s and self._engine.has_work:
            return None
        self._replays_due_s = now + _REPLAYS_INTERVAL_S
        return self._replay_counts()

    def _updates(self, events: list[Event]) -> list[OutputUpdate]:
        updates: list[OutputUpdate] = []
        keys = self._keys
        for event in events:
            key = keys[event.request_id]
            tokens = event.tokens
            steps = [StepCounts(len(tokens), event.num_draft_tokens, event.num_accepted_tokens)] if tokens else []
            updates.append(
                OutputUpdate(
                    key,
                    tokens.copy(),  # updates that wait grow in place, and a draft method may hold the event's list
                    steps,
                    event.finish_reason,
                    event.logprobs,
                    event.prompt_logprobs,
                    event.num_cached_tokens,
                )
            )
            if event.finish_reason is not None:
                del keys[event.request_id]
                del self._request_ids[key]
                reason = str(event.finish_reason)
                self._logger.debug("request finished", request_id=event.request_id, reason=reason)
        return updates

    def _load(self) -> EngineLoad:
        orchestrator = self._engine.orchestrator
        stats, drafts = orchestrator.stats, orchestrator.draft_stats
        return EngineLoad(
            orchestrator.num_running,
            orchestrator.num_waiting,
            orchestrator.pool.usage,
            self._num_steps,
            stats.num_preemptions,
            stats.num_prefix_queries,
            stats.num_prefix_hits,
            drafts.num_drafts,
            drafts.num_draft_tokens,
            drafts.num_accepted_tokens,
            drafts.num_accepted_tokens_per_pos,
            stats.num_stale_outcomes,
        )


def run_engine_process(sock: socket.socket, front_pid: int, build: Callable[[dict[str, object]], BuiltEngine]) -> int:
    """Serve the front at the other end of `sock` until it says stop or is gone; returns the exit status.

    Args:
        sock: a connected stream socket.
        front_pid: the parent; if it dies, this process is killed at once, also in the middle of a long step.
        build: makes the engine from the options that the front sends.
    """
    _die_with(front_pid)
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the front decides when to end, and says so over the link
        signal.signal(ignored, signal.SIG_IGN)
    link = EngineLink(sock)
    try:
        return _serve(link, build)
    except FrontGoneError:
        get_logger(__name__).error("the front is gone")
        return EXIT_FRONT_GONE


def _serve(link: EngineLink, build: Callable[[dict[str, object]], BuiltEngine]) -> int:
    logger = get_logger(__name__)
    start = _receive_start(link)
    configure_logging(start.log_level)
    try:
        built = build(start.config)
    except OutriderError as error:
        link.send_blocking(Failed(error.status, str(error)))
        return EXIT_FAILED
    except Exception as error:
        logger.exception("the engine could not be built")
        link.send_blocking(Failed("INTERNAL", f"the engine could not be built: {error!r}"))
        return EXIT_FAILED
    try:
        link.send_blocking(Ready(built.served))
        EngineProcess(built.engine, link, built.exchange_counts, built.replay_counts).run()
    except (EngineClosedError, msgspec.MsgspecError) as error:
        logger.exception("the engine cannot go on")
        link.send_blocking(Failed("UNAVAILABLE", str(error)))
        return EXIT_FAILED
    finally:
        built.engine.close()
    return EXIT_OK


def _receive_start(link: EngineLink) -> Start:
    while True:
        for message in link.receive(None):
            if not isinstance(message, Start):
                raise FrontGoneError
            return message


def _die_with(parent_pid: int) -> None:
    """Linux kills this process when the parent dies. Elsewhere the end of the link does, between two steps."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        raise SystemExit(EXIT_FRONT_GONE)
