"""Retries of one piece of work: how many are left, where the next one goes, and how long to wait before it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import grpc.aio

from common.errors import RequestTimeoutError
from outrider.client.addresses import Address, AddressPool, backoff_s
from outrider.client.errors import BrokenStreamError, is_connection_failure, is_transient, to_error


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the caller stops waiting; `at` is of the monotonic clock, None for never."""

    at: float | None

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        return cls(None if seconds is None else time.monotonic() + seconds)

    def remaining(self) -> float | None:
        """Seconds left, above 0.

        Raises:
            RequestTimeoutError: there are none.
        """
        if self.at is None:
            return None
        left = self.at - time.monotonic()
        if left <= 0:
            raise RequestTimeoutError("the deadline of the call has passed")
        return left


@dataclass(slots=True)
class Attempts:
    """Another address comes first and at once; where all have been tried, there is a pause that doubles each time."""

    pool: AddressPool
    max_retries: int
    deadline: Deadline
    only: Address | None = None
    """The one address that will do."""
    first: Address | None = None
    """Takes the first attempt."""
    _num_failed: int = 0
    _num_rounds: int = 0
    _tried: list[Address] = field(default_factory=list[Address])

    def next_address(self) -> Address:
        first, self.first = self.first, None
        return self.only or first or self.pool.pick(self._tried)

    def succeeded(self, address: Address) -> None:
        """The work has moved on: it may fail as often as at its start."""
        self.pool.answered(address)
        self._num_failed = self._num_rounds = 0
        self._tried.clear()

    def failed(self, address: Address, failure: grpc.aio.AioRpcError | BrokenStreamError) -> float:
        """Seconds to wait before the next attempt, often 0.

        Raises:
            OutriderError: there is to be none.
        """
        if is_connection_failure(failure):
            self.pool.failed(address)
        self._num_failed += 1
        if not is_transient(failure) or self._num_failed > self.max_retries:
            raise to_error(address.target, failure) from failure
        self._tried.append(address)
        if self.only is None and len(self._tried) < len(self.pool.addresses):
            return 0.0
        self._tried = [address]
        pause = backoff_s(self._num_rounds)
        self._num_rounds += 1
        left = self.deadline.remaining()
        return pause if left is None else min(pause, left)
