"""Addresses: how they are written, which one is picked, and how long one rests."""

from __future__ import annotations

import pytest

from common.errors import InvalidArgumentError
from outrider.client.addresses import AddressPool, backoff_s, parse_addresses


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("a:1", ["a:1"]),
        ("a:1, b:2 ,a:1", ["a:1", "b:2"]),
        (["grpc://a:1", "grpcs://b:2"], ["a:1", "b:2"]),
        ("[::1]:50051", ["[::1]:50051"]),
        ("unix:/run/a.sock", ["unix:/run/a.sock"]),
    ],
)
def test_addresses_as_they_are_written(text: str | list[str], targets: list[str]) -> None:
    assert [address.target for address in parse_addresses(text)] == targets


def test_only_grpcs_asks_for_tls() -> None:
    assert [address.is_tls for address in parse_addresses("grpc://a:1,grpcs://b:2,c:3")] == [False, True, False]


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:0", "a:65536", "a:b", "http://a:1", "unix:", "a:1,", "a:²"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="HOST:PORT"):
        parse_addresses(text)
    with pytest.raises(InvalidArgumentError, match="at least one"):
        parse_addresses([])


def test_calls_go_to_the_least_loaded_and_in_turn() -> None:
    pool = AddressPool(parse_addresses("a:1,b:2,c:3"))
    assert [pool.pick().target for _ in range(6)] == ["a:1", "b:2", "c:3"] * 2
    with pool.call(pool.addresses[0]), pool.call(pool.addresses[1]):
        assert [pool.pick().target for _ in range(2)] == ["c:3", "c:3"]
    assert [address.num_in_flight for address in pool.addresses] == [0, 0, 0]
    assert pool.pick(avoid=pool.addresses[:2]).target == "c:3"


def test_an_address_rests_longer_after_each_failure_and_not_at_all_after_an_answer() -> None:
    now = 100.0
    pool = AddressPool(parse_addresses("a:1,b:2"), clock=lambda: now)
    first, second = pool.addresses
    pauses: list[float] = []
    for _ in range(12):
        pool.failed(first)
        pauses.append(first.rests_until - now)
        assert pool.pick() is second
    assert all(0.05 <= pauses[0] <= 0.1 for _ in pauses)
    assert 2.5 <= max(pauses) <= 5.0
    # Where all rest, the one that is back first is tried all the same.
    for _ in range(20):
        pool.failed(second)
    assert pool.pick() in (first, second)
    assert (first.num_failures, first.num_failures_in_row) == (12, 12)
    pool.answered(first)
    assert first.num_failures_in_row == 0
    assert pool.pick() is first


def test_pauses_have_jitter_and_a_limit() -> None:
    pauses = [backoff_s(number) for number in range(100)]
    assert max(pauses) <= 5.0
    assert min(pauses) >= 0.05
    assert len({backoff_s(3) for _ in range(20)}) > 1


def test_an_address_is_found_by_its_name() -> None:
    pool = AddressPool(parse_addresses("a:1,b:2"))
    assert pool.find("grpc://b:2") is pool.addresses[1]
    with pytest.raises(InvalidArgumentError, match="one of a:1, b:2"):
        pool.find("c:3")
