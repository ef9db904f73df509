"""Polls verifiers for `outrider top`: their load over gRPC, and the rest from their metrics pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import OutriderError
from outrider.client.async_client import AsyncClient
from outrider.client.info import Load, ServerInfo
from outrider.client.metrics_page import MetricsPage, fetch_page


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One verifier at one moment."""

    address: str
    failure: str | None = None
    """Why it is down; None: it is up."""
    model: str = ""
    info: ServerInfo | None = None
    loads: tuple[Load, ...] = ()
    page: MetricsPage | None = None
    """None: no metrics port is known, or nobody answers there."""
    at_s: float = 0.0


class Monitor:
    """Asks all verifiers at the same time.

    Args:
        client: of all addresses.
        metrics: HOST:PORT of the metrics page, by address.
        timeout_s: for one verifier; one that takes longer is down.
    """

    def __init__(self, client: AsyncClient, metrics: Mapping[str, str], timeout_s: float) -> None:
        self._client = client
        self._metrics = metrics
        self._timeout_s = timeout_s

    async def poll(self) -> list[Snapshot]:
        """One snapshot for each address, in their order."""
        return await asyncio.gather(*(self._ask(address.target) for address in self._client.addresses))

    async def _ask(self, target: str) -> Snapshot:
        page = asyncio.create_task(self._page(target))
        try:
            async with asyncio.timeout(self._timeout_s):
                info, loads, model = await asyncio.gather(
                    self._client.server_info(target), self._client.loads(target), self._client.model_info(target)
                )
        except TimeoutError:
            return Snapshot(target, f"no answer in {self._timeout_s:g} s", page=await page, at_s=time.monotonic())
        except OutriderError as error:
            return Snapshot(target, str(error), page=await page, at_s=time.monotonic())
        return Snapshot(
            address=target,
            model=model.name,
            info=info,
            loads=tuple(loads),
            page=await page,
            at_s=time.monotonic(),
        )

    async def _page(self, target: str) -> MetricsPage | None:
        address = self._metrics.get(target)
        return None if address is None else await asyncio.to_thread(fetch_page, address, self._timeout_s)
