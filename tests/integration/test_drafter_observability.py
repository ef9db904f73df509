"""A verifier and its drafter, all four processes: their metrics agree, and a request can be followed through them."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.engine_calls import connected, generate, make_request
from tests.integration.test_observability import free_port
from tests.service_process import OUTRIDER, ServiceProcess, running

DRAFTER_METRICS = {
    "outrider_drafting_worker_up": "gauge",
    "outrider_drafting_rows": "gauge",
    "outrider_drafting_max_rows": "gauge",
    "outrider_drafting_verifiers": "gauge",
    "outrider_drafting_sessions_opened": "counter",
    "outrider_drafting_sessions_closed": "counter",
    "outrider_drafting_stale_changes": "counter",
    "outrider_drafting_duplicate_changes": "counter",
    "outrider_drafting_row_errors": "counter",
    "outrider_drafting_frames": "counter",
    "outrider_drafting_malformed_frames": "counter",
    "outrider_drafting_repeated_frames": "counter",
    "outrider_drafting_branches": "counter",
    "outrider_drafting_draft_tokens": "counter",
    "outrider_drafting_method_seconds": "histogram",
}


def scrape(port: int) -> dict[str, float]:
    """Sums of the samples of a name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        page = response.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        assert DRAFTER_METRICS.get(family.name, family.type) == family.type
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def wait_for(port: int, name: str, value: float, limit_s: float = 20.0, slack: float = 0.0) -> dict[str, float]:
    """Until the sum is `value`, or at most `slack` below."""
    deadline = time.monotonic() + limit_s
    while not value - slack <= (page := scrape(port)).get(name, -1.0) <= value:
        assert time.monotonic() < deadline, f"{name} is {page.get(name)}, expected {value}"
        time.sleep(0.05)
    return page


def loggers_of(process: ServiceProcess, request_id: str) -> set[str]:
    lines = [line for line in list(process.errors) if request_id in line]
    return {json.loads(line)["logger"] for line in lines}


def test_metrics_and_request_ids_of_a_verifier_and_its_drafter(tiny_llama: Path) -> None:
    drafter_port, verifier_port = free_port(), free_port()
    drafter_command = [*OUTRIDER, "--log-level", "debug", "drafter", "--port", "0", "--metrics-port", str(drafter_port)]
    with running(drafter_command) as drafter:
        address = drafter.wait_ready()
        flags = ["--port", "0", "--drafter", f"grpc://{address}", "--metrics-port", str(verifier_port)]
        flags += ["--draft-deadline", "200", "--num-threads", "1"]
        with running([*OUTRIDER, "--log-level", "debug", "verifier", str(tiny_llama), *flags]) as verifier:
            with connected(verifier.wait_ready()) as stub:
                wait_for(verifier_port, "outrider_drafter_up", 1)  # without a request
                prompt = [5, 6, 7, 8, 9] * 8
                params = {"temperature": 0, "max_tokens": 40, "logit_bias": {7: 100.0}}  # a text that repeats itself
                generate(stub, make_request(prompt, request_id="through-all", **params))
                theirs = wait_for(drafter_port, "outrider_drafting_sessions_closed_total", 1)
                # The engine tells the front of its drafters four times a second.
                num_branches = theirs["outrider_drafting_branches_total"]
                assert num_branches > 3
                # A reply that comes behind the last step is read in the first step of the next request.
                wait_for(verifier_port, "outrider_draft_branches_total", num_branches, slack=2)
                ours = wait_for(verifier_port, "outrider_drafter_rows", 0)
            assert ours["outrider_draft_updates_total"] > 5
            assert ours["outrider_draft_round_trip_seconds_count"] > 5
            assert ours["outrider_draft_branch_hits_total"] > 0
            assert ours["outrider_draft_transport_in_use"] == 1
            assert set(DRAFTER_METRICS) <= {name.removesuffix("_total").removesuffix("_count") for name in theirs}
            assert theirs["outrider_drafting_worker_up"] == theirs["outrider_drafting_verifiers"] == 1
            assert theirs["outrider_drafting_sessions_opened_total"] == 1
            assert theirs["outrider_drafting_rows"] == ours["outrider_drafter_rows"] == 0
            assert 0 < theirs["outrider_drafting_method_seconds_count"] <= theirs["outrider_drafting_frames_total"]
            assert loggers_of(verifier, "through-all") == {
                "verifier_svc.front.servicer",
                "verifier_svc.engine.process",
            }
            assert loggers_of(drafter, "through-all") == {"drafter_svc.frame_service"}
        drafter.terminate()
        assert drafter.wait(15) == 0
