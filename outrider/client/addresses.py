"""The addresses of a client: which one takes the next call, and which ones rest after a failure."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.errors import InvalidArgumentError

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


@dataclass(slots=True, eq=False)
class Address:
    """One address and what the client has seen of it."""

    target: str
    """As gRPC wants it: host:port or unix:path."""
    is_tls: bool = False
    num_in_flight: int = 0
    num_calls: int = 0
    num_failures: int = 0
    """Calls that failed for a reason of the address: refused, dropped, unavailable, or nonsense in the answer."""
    num_failures_in_row: int = 0
    rests_until: float = field(default=0.0, repr=False)
    last_used: int = field(default=0, repr=False)


def parse_addresses(addresses: str | Sequence[str]) -> list[Address]:
    """`host:port`, `grpc://host:port`, `grpcs://host:port` (TLS) or `unix:/path`; a list, or one string with commas.

    Raises:
        InvalidArgumentError: none, or one that is no address.
    """
    parts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    found: dict[str, Address] = {}
    for part in parts:
        text = part.strip()
        target = text.removeprefix("grpc://").removeprefix("grpcs://")
        host, _, port = target.rpartition(":")
        is_path = target.startswith("unix:") and len(target) > len("unix:")
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
        if not is_path and not (host and "/" not in target and is_port):
            raise InvalidArgumentError("address", part, "HOST:PORT or unix:PATH")
        found.setdefault(target, Address(target, text.startswith("grpcs://")))
    if not found:
        raise InvalidArgumentError("addresses", addresses, "at least one address")
    return list(found.values())


class AddressPool:
    """Picks the least loaded of the addresses that answered last time.

    Args:
        addresses: at least one.
        clock: seconds, monotonic.
    """

    def __init__(self, addresses: Sequence[Address], clock: Callable[[], float] = time.monotonic) -> None:
        self.addresses = list(addresses)
        self._clock = clock
        self._num_picks = 0

    def pick(self, avoid: Collection[Address] = ()) -> Address:
        """The address for the next call: one not in `avoid` if there is any, then one that does not rest, then the one
        with the fewest calls of this client in flight, then the one that was used the longest ago."""
        now = self._clock()
        best = min(
            self.addresses,
            key=lambda address: (
                address in avoid,
                max(0.0, address.rests_until - now),
                address.num_in_flight,
                address.last_used,
            ),
        )
        self._num_picks += 1
        best.last_used = self._num_picks
        return best

    def find(self, target: str) -> Address:
        """Raises InvalidArgumentError if the client has no such address."""
        for address in self.addresses:
            if address.target == target.removeprefix("grpc://").removeprefix("grpcs://"):
                return address
        known = ", ".join(address.target for address in self.addresses)
        raise InvalidArgumentError("address", target, f"one of {known}")

    @contextmanager
    def call(self, address: Address) -> Iterator[None]:
        """Count a call while it lasts."""
        address.num_calls += 1
        address.num_in_flight += 1
        try:
            yield
        finally:
            address.num_in_flight -= 1

    def answered(self, address: Address) -> None:
        address.num_failures_in_row = 0
        address.rests_until = 0.0

    def failed(self, address: Address) -> None:
        """It is passed over for a while, longer each time; where no other is left, it is tried all the same."""
        address.num_failures += 1
        address.num_failures_in_row += 1
        address.rests_until = self._clock() + backoff_s(address.num_failures_in_row - 1)


def backoff_s(num_before: int) -> float:
    """Seconds to wait after a failure with `num_before` failures before it: doubled each time, with jitter so that the
    clients of a server that comes back do not all arrive at once."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(num_before, 16)) * random.uniform(0.5, 1.0)
