"""`outrider top`: a live view of verifiers: load, speed, acceptance per position and source, drafters, transport."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from common.errors import InvalidArgumentError
from outrider.client.flags import DEFAULT_ADDRESS, add_connection_arguments, connection_options

if TYPE_CHECKING:  # gRPC is imported when the command runs, not when its help is shown
    from outrider.client.metrics_page import MetricsPage
    from outrider.client.monitor import Snapshot

_FILE_WIDTH = 200
_NOTHING = "-"
_GENERATED = "vllm:generation_tokens"
_DRAFTS = "vllm:spec_decode_num_drafts"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
_ACCEPTED_PER_POS = "vllm:spec_decode_num_accepted_tokens_per_pos"
_DRAFTER_UP = "outrider_drafter_up"
_DRAFTER_HUNG = "outrider_drafter_hung"
_DRAFTER_DRAFT_TOKENS = "outrider_drafter_draft_tokens"
_DRAFTER_ACCEPTED = "outrider_drafter_accepted_tokens"
_TRANSPORT = "outrider_draft_transport_in_use"
_IN_PROCESS = "in-process"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "addresses", nargs="*", metavar="HOST:PORT", help=f"verifiers to watch; default: {DEFAULT_ADDRESS}"
    )
    parser.add_argument(
        "--metrics",
        default="",
        metavar="[HOST:]PORT[,...]",
        help="where their metrics are: one for each verifier, or one port for all of them",
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds; default: %(default)s")
    parser.add_argument("--once", action="store_true", help="print one table and leave")
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0; with --once 1 if a verifier is down."""
    if not args.interval > 0:
        raise InvalidArgumentError("--interval", args.interval, "seconds above 0")
    options = connection_options(args)
    return asyncio.run(_run(args, options))


async def _run(args: argparse.Namespace, options: dict[str, Any]) -> int:
    from outrider.client.async_client import AsyncClient
    from outrider.client.monitor import Monitor

    addresses = args.addresses or [DEFAULT_ADDRESS]
    timeout_s = max(2.0, args.interval)
    async with AsyncClient(addresses, timeout=timeout_s, max_retries=0, **options) as client:
        targets = [address.target for address in client.addresses]
        monitor = Monitor(client, metrics_addresses(args.metrics, targets), timeout_s)
        console = Console()
        snapshots = await monitor.poll()
        if args.once:
            if not console.is_terminal:
                console.width = max(console.width, _FILE_WIDTH)
            console.print(render(snapshots, []))
            return int(any(snapshot.failure is not None for snapshot in snapshots))
        earlier: Sequence[Snapshot] = []
        with Live(render(snapshots, earlier), console=console, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(args.interval)
                earlier, snapshots = snapshots, await monitor.poll()
                live.update(render(snapshots, earlier), refresh=True)


def metrics_addresses(text: str, targets: Sequence[str]) -> dict[str, str]:
    """Address of the metrics page by address of the verifier.

    Raises:
        InvalidArgumentError: another number of them than there are verifiers, or no port.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) == 1:
        parts *= len(targets)
    if parts and len(parts) != len(targets):
        raise InvalidArgumentError("--metrics", text, f"one for each of the {len(targets)} verifiers, or one port")
    found: dict[str, str] = {}
    for target, part in zip(targets, parts, strict=False):
        host, _, port = part.rpartition(":")
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise InvalidArgumentError("--metrics", part, "[HOST:]PORT")
        if not host:
            host = "127.0.0.1" if target.startswith("unix:") else target.rpartition(":")[0]
        found[target] = f"{host}:{port}"
    return found


def render(snapshots: Sequence[Snapshot], earlier: Sequence[Snapshot]) -> Group:
    """Two tables and what is wrong; `earlier` gives the rates of what only counts up."""
    before = {snapshot.address: snapshot for snapshot in earlier}
    failures = [Text(f"{entry.address}: {entry.failure}", "red") for entry in snapshots if entry.failure is not None]
    return Group(_load_table(snapshots, before), _draft_table(snapshots), *failures)


def _load_table(snapshots: Sequence[Snapshot], before: dict[str, Snapshot]) -> Table:
    table = Table(title="Verifiers", title_justify="left")
    table.add_column("address", overflow="fold")
    for name in ("state", "model", "up for"):
        table.add_column(name)
    for name in ("running", "waiting", "KV cache", "prefix hits", "tokens/s"):
        table.add_column(name, justify="right")
    for snapshot in snapshots:
        if snapshot.failure is not None or snapshot.info is None:
            table.add_row(snapshot.address, "[bold red]down[/]", *[_NOTHING] * 7)
            continue
        loads = snapshot.loads
        num_rows = sum(load.max_num_seqs for load in loads)
        running = sum(load.num_running for load in loads)
        used, room = sum(load.num_used_tokens for load in loads), sum(load.max_num_tokens for load in loads)
        usage = used / room if room else max((load.kv_cache_usage for load in loads), default=None)
        table.add_row(
            snapshot.address,
            "[yellow]paused[/]" if snapshot.info.is_paused else "[green]up[/]",
            escape(snapshot.model) or _NOTHING,
            _duration(snapshot.info.uptime_s),
            f"{running}/{num_rows}" if num_rows else str(running),
            str(sum(load.num_waiting for load in loads)) if loads else _NOTHING,
            _share(usage),
            _share(max((load.prefix_hit_rate for load in loads), default=None)),
            _tokens_per_second(snapshot, before.get(snapshot.address)),
        )
    return table


def _draft_table(snapshots: Sequence[Snapshot]) -> Table:
    table = Table(title="Drafts", title_justify="left")
    table.add_column("address", overflow="fold")
    table.add_column("length", justify="right")
    table.add_column("rate", justify="right")
    for name in ("by position", "by source", "drafters up", "transport"):
        table.add_column(name)
    for snapshot in snapshots:
        page = snapshot.page
        if page is None:
            table.add_row(snapshot.address, *[_NOTHING] * 6)
            continue
        drafts, accepted = page.total(_DRAFTS), page.total(_ACCEPTED)
        length = 1 + accepted / drafts if drafts and accepted is not None else None
        table.add_row(
            snapshot.address,
            _NOTHING if length is None else f"{length:.2f}",
            _share(_ratio(accepted, page.total(_DRAFT_TOKENS))),
            _by_position(page, drafts),
            _by_source(page),
            _drafters(page),
            _transports(page),
        )
    return table


def _tokens_per_second(snapshot: Snapshot, before: Snapshot | None) -> str:
    """From the counter if there are two of it, since the service's own figure looks back over a longer time."""
    now = None if snapshot.page is None else snapshot.page.total(_GENERATED)
    then = None if before is None or before.page is None else before.page.total(_GENERATED)
    if now is not None and then is not None and before is not None and now >= then and snapshot.at_s > before.at_s:
        return f"{(now - then) / (snapshot.at_s - before.at_s):.0f}"
    return f"{sum(load.tokens_per_second for load in snapshot.loads):.0f}" if snapshot.loads else _NOTHING


def _by_position(page: MetricsPage, num_drafts: float | None) -> str:
    """Share of all drafts whose token at the position was accepted."""
    counts = page.by_label(_ACCEPTED_PER_POS, "position")
    if not counts or not num_drafts:
        return _NOTHING
    ordered = sorted(counts.items(), key=lambda item: (len(item[0]), item[0]))
    return " ".join(f"{count / num_drafts:.0%}" for _, count in ordered)


def _by_source(page: MetricsPage) -> str:
    """Acceptance rate of each drafter, and of what the verifier drafted itself: the rest of all drafts."""
    drafted = page.by_label(_DRAFTER_DRAFT_TOKENS, "drafter")
    accepted = page.by_label(_DRAFTER_ACCEPTED, "drafter")
    rest = (page.total(_DRAFT_TOKENS) or 0.0) - sum(drafted.values())
    if rest > 0:
        drafted[_IN_PROCESS] = rest
        accepted[_IN_PROCESS] = (page.total(_ACCEPTED) or 0.0) - sum(accepted.values())
    shares = [f"{source} {_share(_ratio(accepted.get(source, 0.0), count))}" for source, count in drafted.items()]
    return escape(", ".join(shares)) or _NOTHING


def _drafters(page: MetricsPage) -> str:
    up, hung = page.by_label(_DRAFTER_UP, "drafter"), page.by_label(_DRAFTER_HUNG, "drafter")
    if not up:
        return _NOTHING
    bad = [f"{drafter} down" for drafter, value in up.items() if value <= 0]
    bad += [f"{drafter} hangs" for drafter, value in hung.items() if value > 0 and up.get(drafter, 0) > 0]
    text = f"{len(up) - len(bad)}/{len(up)}"
    return f"{text} [red]({escape(', '.join(bad))})[/]" if bad else text


def _transports(page: MetricsPage) -> str:
    in_use = [name for name, value in page.by_label(_TRANSPORT, "transport").items() if value > 0]
    if not in_use and page.total(_DRAFTS):
        in_use = [_IN_PROCESS]
    return escape(", ".join(in_use)) or _NOTHING


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _share(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
