"""Both clients against a server that fails on demand, over real sockets. No test takes longer than its deadlines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from common.engine_extensions import NUM_OUTPUT_TOKENS
from common.errors import (
    InvalidArgumentError,
    OutriderError,
    RequestTimeoutError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedError,
)
from common.sampling_params import SamplingParams
from outrider import AsyncClient, Client
from outrider.client.errors import ServiceError
from outrider.outputs import RequestOutput
from tests.fake_engine_server import FakeEngine, FakeServer, Fault, expected_outputs, start_server
from verifier_svc.front.output_stream import OutputDelta

PROMPT = list(b"once upon")
PARAMS = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
LIMIT_S = 20.0


@pytest.fixture
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    with start_server() as first, start_server() as second:
        yield first, second


@pytest.fixture
def client(servers: tuple[FakeServer, FakeServer]) -> Iterator[Client]:
    """Calls go to the first server first."""
    with Client([server.address for server in servers], timeout=LIMIT_S) as client:
        yield client


def assert_complete(output: RequestOutput, params: SamplingParams) -> None:
    expected = expected_outputs(PROMPT, params)
    assert [found.token_ids for found in output.outputs] == [stream.token_ids for stream in expected]
    assert [found.text for found in output.outputs] == [stream.text for stream in expected]
    assert [found.finish_reason for found in output.outputs] == [str(stream.finish_reason) for stream in expected]
    assert [found.stop_reason for found in output.outputs] == [stream.stop_reason for stream in expected]


def wait_for(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


# -- without a fault ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        PARAMS,
        SamplingParams(seed=9, n=3, max_tokens=200),
        SamplingParams(seed=2**63, max_tokens=30, logprobs=2, prompt_logprobs=1),
        SamplingParams(seed=1, max_tokens=100, stop=("q", "zz"), ignore_eos=True),
        SamplingParams(seed=1, max_tokens=100, stop_token_ids=(ord("e"),), include_stop_str_in_output=True),
    ],
)
def test_what_comes_is_what_was_sampled(client: Client, params: SamplingParams) -> None:
    output = client.generate(PROMPT, params)
    assert_complete(output, params)
    for found, stream in zip(output.outputs, expected_outputs(PROMPT, params), strict=True):
        assert found.draft_stats == stream.draft_stats
        assert (found.logprobs is None) is (params.logprobs is None)
    if params.prompt_logprobs is not None:
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(PROMPT)


def test_text_is_tokenized_by_the_services_tokenizer(client: Client) -> None:
    output = client.generate("once upon", PARAMS)
    assert (output.prompt, output.prompt_token_ids) == ("once upon", PROMPT)
    assert_complete(output, PARAMS)


def test_a_stream_is_the_output_in_pieces(client: Client) -> None:
    deltas = list(client.stream(PROMPT, PARAMS))
    (expected,) = expected_outputs(PROMPT, PARAMS)
    assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [expected.finish_reason]
    assert sum(delta.num_accepted_tokens for delta in deltas) == expected.draft_stats.num_accepted_tokens


def test_without_a_seed_two_outputs_differ(client: Client) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    assert client.generate(PROMPT, params).outputs[0].text != client.generate(PROMPT, params).outputs[0].text


def test_many_threads_share_a_client(client: Client) -> None:
    found: list[RequestOutput] = []
    threads = [threading.Thread(target=lambda: found.append(client.generate(PROMPT, PARAMS))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(found) == 8
    for output in found:
        assert_complete(output, PARAMS)


def test_calls_are_spread(servers: tuple[FakeServer, FakeServer], client: Client) -> None:
    for _ in range(6):
        client.generate(PROMPT, PARAMS)
    assert [len(server.engine.requests) for server in servers] == [3, 3]
    ids = {request.request_id for server in servers for request in server.engine.requests}
    assert len(ids) == 6


# -- faults before the first token -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED", "end", "bytes", "empty", "early"])
@pytest.mark.parametrize("after", [0, 7])
def test_another_address_takes_over(
    servers: tuple[FakeServer, FakeServer], client: Client, kind: str, after: int
) -> None:
    first, second = servers
    first.engine.faults.append(Fault(kind, after))
    assert_complete(client.generate(PROMPT, PARAMS), PARAMS)
    assert (len(first.engine.requests), len(second.engine.requests)) == (1, 1)
    resumed = second.engine.metadata[0].get(NUM_OUTPUT_TOKENS)
    assert (resumed is None) is (after == 0)
    speaks_against_address = kind != "RESOURCE_EXHAUSTED"
    assert client.addresses[0].num_failures == int(speaks_against_address)


@pytest.mark.parametrize("kind", ["index", "reason", "bytes", "early"])
def test_nonsense_in_mid_stream_is_not_believed(
    servers: tuple[FakeServer, FakeServer], client: Client, kind: str
) -> None:
    servers[0].engine.faults.append(Fault(kind, 5))
    servers[1].engine.faults.append(Fault(kind, 3))
    assert_complete(client.generate(PROMPT, PARAMS), PARAMS)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("INVALID_ARGUMENT", InvalidArgumentError),
        ("UNIMPLEMENTED", UnsupportedError),
        ("INTERNAL", ServiceError),
        ("error", ServiceError),
    ],
)
def test_what_cannot_be_cured_is_not_tried_again(
    servers: tuple[FakeServer, FakeServer], client: Client, kind: str, error: type[OutriderError]
) -> None:
    servers[0].engine.faults.append(Fault(kind, 2))
    with pytest.raises(error):
        client.generate(PROMPT, PARAMS)
    assert len(servers[1].engine.requests) == 0
    assert_complete(client.generate(PROMPT, PARAMS), PARAMS)  # and the client goes on


def test_retries_are_bounded() -> None:
    with start_server() as server, Client(server.address, max_retries=2, timeout=LIMIT_S) as client:
        server.engine.faults += [Fault("RESOURCE_EXHAUSTED")] * 3
        with pytest.raises(ResourceExhaustedError, match="scripted"):
            client.generate(PROMPT, PARAMS)
        assert len(server.engine.requests) == 3
        server.engine.faults += [Fault("UNAVAILABLE")] * 2
        assert_complete(client.generate(PROMPT, PARAMS), PARAMS)


def test_nobody_is_there() -> None:
    with start_server() as server:
        address = server.address
    start = time.monotonic()
    with Client(address, max_retries=2, timeout=LIMIT_S) as client:
        with pytest.raises(UnavailableError, match=address):
            client.generate(PROMPT, PARAMS)
        assert not client.health()[address].is_healthy
        assert client.addresses[0].num_failures >= 3
    assert time.monotonic() - start < 10


# -- faults behind it --------------------------------------------------------------------------------------------------


def test_many_cuts_in_one_stream(servers: tuple[FakeServer, FakeServer], client: Client) -> None:
    params = SamplingParams(seed=4, max_tokens=80, ignore_eos=True, presence_penalty=0.5, min_tokens=60, logprobs=1)
    for server in servers:
        server.engine.faults += [Fault(kind, 3) for kind in ("UNAVAILABLE", "end", "CANCELLED", "index")]
    deltas = list(client.stream(PROMPT, params))
    (expected,) = expected_outputs(PROMPT, params)
    assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
    assert "".join(delta.text for delta in deltas) == expected.text
    assert sum(len(server.engine.requests) for server in servers) == 9


def test_outputs_of_a_prompt_are_resumed_each_by_itself(servers: tuple[FakeServer, FakeServer], client: Client) -> None:
    params = SamplingParams(seed=7, n=4, max_tokens=50)
    servers[0].engine.faults += [Fault("UNAVAILABLE", after) for after in (0, 2, 9, 4)]
    assert_complete(client.generate(PROMPT, params), params)
    assert all(request.sampling_params.n == 1 for server in servers for request in server.engine.requests)


@pytest.mark.parametrize("text", ["the first", "the second"])
def test_a_stop_string_over_the_cut_is_found(servers: tuple[FakeServer, FakeServer], client: Client, text: str) -> None:
    (whole,) = expected_outputs(PROMPT, PARAMS)
    servers[0].engine.extensions = servers[1].engine.extensions = text == "the first"
    for start in range(3, 15):
        params = PARAMS.model_copy(update={"stop": (whole.text[start : start + 4],)})
        for server in servers:
            server.engine.faults = [Fault("UNAVAILABLE", 4)] * 2
        output = client.generate(PROMPT, params)
        assert_complete(output, params)
        assert output.outputs[0].text == whole.text[: whole.text.index(params.stop[0])]


def test_a_lost_end_is_asked_for_again(servers: tuple[FakeServer, FakeServer], client: Client) -> None:
    for params in (PARAMS, SamplingParams(seed=3, max_tokens=200), PARAMS.model_copy(update={"max_tokens": 1})):
        (expected,) = expected_outputs(PROMPT, params)
        for kind in ("UNAVAILABLE", "end"):
            num_before = sum(len(server.engine.requests) for server in servers)
            for server in servers:
                server.engine.faults = [Fault(kind, expected.draft_stats.num_drafts + num) for num in range(0, 99, 9)]
            assert_complete(client.generate(PROMPT, params), params)
            assert sum(len(server.engine.requests) for server in servers) > num_before
        for server in servers:
            server.engine.faults = []


def test_a_server_that_dies_under_a_stream() -> None:
    deltas: list[OutputDelta] = []
    with (
        start_server(FakeEngine(delay_s=0.01)) as first,
        start_server() as second,
        Client([first.address, second.address], timeout=LIMIT_S) as client,
    ):
        for delta in client.stream(PROMPT, PARAMS):
            deltas.append(delta)
            if len(deltas) == 4:
                first.stop()
        assert len(second.engine.requests) == 1
    (expected,) = expected_outputs(PROMPT, PARAMS)
    assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids


def test_a_server_that_comes_back_at_the_same_address() -> None:
    first = start_server(FakeEngine(delay_s=0.01))
    with Client(first.address, timeout=LIMIT_S) as client:
        deltas = client.stream(PROMPT, PARAMS)
        tokens = [token for _ in range(4) for token in next(deltas).token_ids]
        first.stop()
        with start_server(port=first.port):
            tokens += [token for delta in deltas for token in delta.token_ids]
        assert tokens == expected_outputs(PROMPT, PARAMS)[0].token_ids


# -- deadlines, cancellation, abort ------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 5])
def test_a_deadline_ends_the_call_on_both_sides(
    servers: tuple[FakeServer, FakeServer], client: Client, after: int
) -> None:
    client.generate(PROMPT, PARAMS)  # learns the model of the first, so that the deadline is that of Generate
    client.generate(PROMPT, PARAMS)
    servers[0].engine.faults.append(Fault("hang", after))
    start = time.monotonic()
    with pytest.raises(RequestTimeoutError):
        client.generate(PROMPT, PARAMS, timeout=0.4)
    assert 0.3 < time.monotonic() - start < 5
    wait_for(lambda: servers[0].engine.num_running == 0)


def test_the_deadline_holds_over_all_attempts() -> None:
    with start_server() as server, Client(server.address, max_retries=1000, timeout=0.8) as client:
        server.engine.faults += [Fault("UNAVAILABLE")] * 1000
        start = time.monotonic()
        with pytest.raises((RequestTimeoutError, UnavailableError)):
            client.generate(PROMPT, PARAMS)
        assert time.monotonic() - start < 5


def test_closing_the_iterator_cancels(servers: tuple[FakeServer, FakeServer], client: Client) -> None:
    servers[0].engine.faults.append(Fault("hang", 4))
    deltas = client.stream(PROMPT, PARAMS)
    next(deltas)
    deltas.close()
    wait_for(lambda: servers[0].engine.num_running == 0)
    assert servers[0].engine.num_finished == 0
    assert client.addresses[0].num_in_flight == 0
    assert len(servers[1].engine.requests) == 0


def test_cancelling_the_task_cancels_all_outputs(servers: tuple[FakeServer, FakeServer]) -> None:
    servers[0].engine.faults += [Fault("hang", 3)] * 3

    async def main() -> None:
        async with AsyncClient([server.address for server in servers]) as client:
            task = asyncio.create_task(client.generate(PROMPT, PARAMS.model_copy(update={"n": 3})))
            while servers[0].engine.num_running < 3:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while servers[0].engine.num_running:
                await asyncio.sleep(0.01)
            assert client.addresses[0].num_in_flight == 0

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert len(servers[1].engine.requests) == 0


def test_leaving_an_async_stream_cancels(servers: tuple[FakeServer, FakeServer]) -> None:
    servers[0].engine.faults.append(Fault("hang", 4))

    async def main() -> None:
        async with AsyncClient(servers[0].address) as client:
            deltas = client.stream(PROMPT, PARAMS)
            async for _ in deltas:
                break
            await deltas.aclose()
            while servers[0].engine.num_running:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


@pytest.mark.parametrize("phase", ["streaming", "between attempts"])
def test_abort_ends_a_request_with_what_it_has(phase: str) -> None:
    with start_server() as server, Client(server.address, timeout=LIMIT_S, max_retries=50) as client:
        if phase == "streaming":
            server.engine.faults.append(Fault("hang", 6))
        else:
            server.engine.faults += [Fault("UNAVAILABLE", 6)] + [Fault("UNAVAILABLE")] * 40
        timer = threading.Timer(0.6, lambda: client.abort("mine"))
        timer.start()
        start = time.monotonic()
        output = client.generate(PROMPT, PARAMS, request_id="mine").outputs[0]
        timer.join()
        assert time.monotonic() - start < 5
        (expected,) = expected_outputs(PROMPT, PARAMS)
        assert output.finish_reason == "abort"
        assert 0 < len(output.token_ids) < 40
        assert output.token_ids == expected.token_ids[: len(output.token_ids)]
        assert server.engine.aborted_ids == []


def test_a_request_of_another_client_is_aborted_everywhere(
    servers: tuple[FakeServer, FakeServer], client: Client
) -> None:
    client.abort("theirs")
    assert [server.engine.aborted_ids for server in servers] == [["theirs"], ["theirs"]]


def test_close_ends_what_runs() -> None:
    with start_server(FakeEngine(faults=[Fault("hang", 4)])) as server:
        client = Client(server.address, timeout=LIMIT_S)
        outputs: list[RequestOutput] = []
        thread = threading.Thread(target=lambda: outputs.append(client.generate(PROMPT, PARAMS)))
        thread.start()
        wait_for(lambda: server.engine.num_running == 1)
        time.sleep(0.1)
        client.close()
        client.close()
        thread.join(5)
        assert not thread.is_alive()
        wait_for(lambda: server.engine.num_running == 0)
        with pytest.raises(UnavailableError, match="closed"):
            client.generate(PROMPT, PARAMS)
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort"]


# -- what is refused here ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([], PARAMS),
        ([999], PARAMS),
        (list(range(600)), PARAMS),
        (b"bytes", PARAMS),
        (PROMPT, SamplingParams(bad_words=("x",))),
        (PROMPT, SamplingParams(stop_token_ids=(999,))),
    ],
)
def test_bad_input_does_not_leave_the_client(
    servers: tuple[FakeServer, FakeServer], client: Client, prompt: list[int], params: SamplingParams
) -> None:
    with pytest.raises(InvalidArgumentError):
        client.generate(prompt, params)
    assert [server.engine.requests for server in servers] == [[], []]


def test_a_stream_has_one_output(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="when streaming"):
        next(client.stream(PROMPT, SamplingParams(n=2)))
    with pytest.raises(InvalidArgumentError, match="timeout"):
        client.generate(PROMPT, PARAMS, timeout=-1)
    with pytest.raises(InvalidArgumentError, match="request_id"):
        client.generate(PROMPT, PARAMS, request_id="x" * 300)


def test_a_service_of_token_ids_needs_no_tokenizer() -> None:
    with start_server(FakeEngine(archive=None)) as server, Client(server.address, timeout=LIMIT_S) as client:
        output = client.generate(PROMPT, PARAMS).outputs[0]
        assert output.token_ids == expected_outputs(PROMPT, PARAMS)[0].token_ids
        assert output.text == ""
        assert client.tokenizer() is None
        with pytest.raises(InvalidArgumentError, match="no tokenizer"):
            client.generate("once upon", PARAMS)


@pytest.mark.parametrize("engine", [FakeEngine(archive=b"no zip"), FakeEngine(sha256="0" * 64)])
def test_a_tokenizer_that_is_none_is_refused(engine: FakeEngine) -> None:
    with (
        start_server(engine) as server,
        Client(server.address, timeout=LIMIT_S) as client,
        pytest.raises(ServiceError, match="tokenizer"),
    ):
        client.generate(PROMPT, PARAMS)


def test_a_service_without_extensions_refuses_large_seeds(
    servers: tuple[FakeServer, FakeServer], client: Client
) -> None:
    servers[0].engine.extensions = False
    with pytest.raises(UnsupportedError, match="at most 4294967295"):
        client.generate(PROMPT, SamplingParams(seed=2**40))


# -- information -------------------------------------------------------------------------------------------------------


def test_what_a_service_says_of_itself(servers: tuple[FakeServer, FakeServer], client: Client) -> None:
    first = servers[0].address
    assert {health.is_healthy for health in client.health().values()} == {True}
    assert client.model_info().name == "fake"
    assert client.server_info(first).uptime_s == 12.5
    (load,) = client.loads(first)
    assert (load.num_running, load.num_waiting, load.kv_cache_usage) == (3, 2, 0.25)
    with pytest.raises(InvalidArgumentError, match="one of"):
        client.loads("elsewhere:1")
    servers[0].stop()
    assert [health.is_healthy for health in client.health().values()] == [False, True]
    assert client.model_info().name == "fake"  # of the other one
    with pytest.raises(UnavailableError):
        client.server_info(first)
