"""Prometheus metrics: counts kept as plain numbers, turned into families only when somebody scrapes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from socketserver import ThreadingMixIn
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.errors import InvalidArgumentError

_SCRAPE_TIMEOUT_S = 10.0
_POLL_S = 0.1  # how long `close` takes


class Source(Protocol):
    """Whatever has metrics. Called in a thread of the server, so it reads and changes nothing."""

    def collect(self) -> Iterable[Metric]: ...


class Families:
    """Collects samples under the same labels.

    Args:
        labels: names and values that every sample has.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self._families: dict[str, Metric] = {}

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        """A number that only grows. Its sample is called `name`_total, as the text format has it."""
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = CounterMetricFamily(name, text, labels=[*self._names, *labels])
        assert isinstance(family, CounterMetricFamily)
        family.add_metric([*self._values, *labels.values()], value)

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        """A number that goes up and down."""
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = GaugeMetricFamily(name, text, labels=[*self._names, *labels])
        assert isinstance(family, GaugeMetricFamily)
        family.add_metric([*self._values, *labels.values()], value)

    def histogram(self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> None:
        """Observations by size: `counts` has one entry a bound, and one for what is beyond the last."""
        self.labelled_histogram(name, text, bounds, counts, total, {})

    def labelled_histogram(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        counts: Sequence[int],
        total: float,
        labels: dict[str, str],
    ) -> None:
        """The same with labels of its own."""
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = HistogramMetricFamily(name, text, labels=[*self._names, *labels])
        assert isinstance(family, HistogramMetricFamily)
        buckets: list[tuple[str, float]] = []
        cumulated = 0
        for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
            cumulated += count
            buckets.append((bound, cumulated))
        family.add_metric([*self._values, *labels.values()], buckets, total)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())


class MetricsServer:
    """Serves /metrics over HTTP from threads of its own.

    Args:
        host: address to listen on.
        port: 0 takes a free one.
        source: asked at every scrape.

    Raises:
        InvalidArgumentError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, source: Source) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_AsCollector(source))
        ProcessCollector(registry=registry)
        app: Callable[..., Any] = exposition.make_wsgi_app(registry)  # type: ignore[reportUnknownMemberType]
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            server_class = type("_Server", (_Server,), {"address_family": family})
            self._server = make_server(host, port, app, server_class, _Handler)
        except OSError as error:
            expected = f"an address that can be bound ({error.strerror})"
            raise InvalidArgumentError("metrics_port", f"{host}:{port}", expected) from None
        self.port = int(self._server.server_port)
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="outrider-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening. A scrape that runs is not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _AsCollector(Collector):
    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        return self._source.collect()

    def describe(self) -> Iterable[Metric]:
        return ()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False


class _Handler(WSGIRequestHandler):
    timeout = _SCRAPE_TIMEOUT_S  # of one that connects and says nothing

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Scrapes are no news."""
