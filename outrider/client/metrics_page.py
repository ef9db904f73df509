"""What `outrider top` reads of a verifier's Prometheus page."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

MAX_PAGE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the page."""

    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """Samples by metric name. Counters may carry `_total` or not."""

    samples: dict[str, list[Sample]] = field(default_factory=dict[str, list[Sample]])

    def find(self, name: str) -> list[Sample]:
        return self.samples.get(name) or self.samples.get(f"{name}_total") or []

    def total(self, name: str) -> float | None:
        """Over all labels; None: there is no such metric."""
        found = self.find(name)
        return sum(sample.value for sample in found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums for each value of `label`, in the order of the page."""
        sums: dict[str, float] = {}
        for sample in self.find(name):
            if label in sample.labels:
                key = sample.labels[label]
                sums[key] = sums.get(key, 0.0) + sample.value
        return sums


def parse_page(text: str) -> MetricsPage:
    """Raises ValueError if it is no Prometheus page."""
    page = MetricsPage()
    for name, sample in _samples(text):
        page.samples.setdefault(name, []).append(sample)
    return page


def fetch_page(address: str, timeout_s: float) -> MetricsPage | None:
    """The page at HOST:PORT; None: nobody answers, or not with such a page."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as response:
            return parse_page(response.read(MAX_PAGE_BYTES).decode())
    except (OSError, ValueError):  # urllib's own errors are OSErrors
        return None


def _samples(text: str) -> Iterator[tuple[str, Sample]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, Sample(dict(sample.labels), float(sample.value))
