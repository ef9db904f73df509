"""`outrider client`: send a prompt to a verifier and watch the text come; accepted draft tokens are coloured."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from common.errors import InvalidArgumentError
from common.sampling_params import SamplingParams
from common.types import DraftStats, FinishReason
from outrider.client.flags import DEFAULT_ADDRESS, add_connection_arguments, connection_options

if TYPE_CHECKING:  # gRPC is imported when the command runs, not when its help is shown
    from verifier_svc.front.output_stream import OutputDelta

_ACCEPTED = "bold green"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT[,...]",
        help="verifiers of one model; if one fails, the text goes on at another; default: %(default)s",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="what the model continues; default: standard input")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="0 is greedy; default: %(default)s")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="X", help="default: %(default)s")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="0 keeps all; default: %(default)s")
    parser.add_argument("--seed", type=int, metavar="N", help="default: drawn at random")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    parser.add_argument(
        "--num-speculative-tokens", type=int, metavar="K", help="at most this many a step; 0 turns speculation off"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds; default: %(default)s")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: %(default)s")
    parser.add_argument("--no-stats", action="store_true", help="print the text alone")
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the text on standard output and one line about it on standard error."""
    options = connection_options(args)
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=tuple(args.stop),
        num_speculative_tokens=args.num_speculative_tokens,
    )
    prompt = _read_prompt(args.prompt)
    try:
        return _print_stream(args, options, prompt, params)
    except BrokenPipeError:  # whoever read the text has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 0


def _print_stream(args: argparse.Namespace, options: dict[str, Any], prompt: str, params: SamplingParams) -> int:
    from outrider.client.sync_client import Client

    stats = DraftStats()
    num_tokens = 0
    finish_reason: FinishReason | None = None
    console = Console(
        highlight=False, force_terminal={"auto": None, "always": True, "never": False}[args.color], soft_wrap=True
    )
    with Client(args.address, timeout=args.timeout, **options) as client:
        start = first = time.perf_counter()
        for delta in client.stream(prompt, params):
            if num_tokens == 0:
                first = time.perf_counter()
            num_tokens += len(delta.token_ids)
            stats.add(delta.num_draft_tokens, delta.num_accepted_tokens)
            finish_reason = delta.finish_reason
            _show(delta, console)
        end = time.perf_counter()
    console.file.write("\n")
    if not args.no_stats:
        parts = [f"{num_tokens} tokens in {end - start:.2f} s"]
        if num_tokens > 1 and end > first:
            parts.append(f"first after {(first - start) * 1e3:.0f} ms, then {(num_tokens - 1) / (end - first):.0f}/s")
        if stats.num_drafts:
            parts.append(f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens accepted")
        print(", ".join(parts) + f"; ended by {finish_reason}", file=sys.stderr)
    return 0


def _read_prompt(text: str | None) -> str:
    if text is None:
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise InvalidArgumentError("standard input", error.reason, "UTF-8 text") from None
    if not text:
        raise InvalidArgumentError("--prompt", text, "some text")
    return text


def _show(delta: OutputDelta, console: Console) -> None:
    if not delta.text:
        return
    if not console.is_terminal:
        console.file.write(delta.text)  # as it is: no tab expanded, no line wrapped
    else:
        # A model may write anything; what steers the terminal is not passed on.
        text = delta.text.replace("\x1b", "\N{REPLACEMENT CHARACTER}")
        accepted, rest = text[: delta.num_accepted_chars], text[delta.num_accepted_chars :]
        console.print(Text.assemble((accepted, _ACCEPTED), rest), end="", soft_wrap=True)
    console.file.flush()
