"""The metrics page of a verifier, as `outrider top` reads it."""

from __future__ import annotations

import http.server
import threading

import pytest

from outrider.client.metrics_page import fetch_page, parse_page

PAGE = """# HELP vllm:spec_decode_num_drafts Rows and steps with a draft.
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{model_name="m"} 10.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="n",position="1"} 1.0
# TYPE outrider_drafter_up gauge
outrider_drafter_up{drafter="a:1"} 1.0
"""


def test_totals_and_sums_by_label() -> None:
    page = parse_page(PAGE)
    assert page.total("vllm:spec_decode_num_drafts") == 10
    assert page.total("outrider_drafter_up") == 1
    assert page.total("outrider_nothing") is None
    assert page.by_label("vllm:spec_decode_num_accepted_tokens_per_pos", "position") == {"0": 8, "1": 6}
    assert page.by_label("vllm:spec_decode_num_drafts", "position") == {}


def test_what_is_no_page_is_a_value_error() -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (the parser's own words)
        parse_page("{ not metrics")


@pytest.mark.parametrize(("body", "is_page"), [(PAGE.encode(), True), (b"{ not metrics", False), (b"\xff\xfe", False)])
def test_a_page_comes_over_http(body: bytes, is_page: bool) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            page = fetch_page(f"127.0.0.1:{server.server_port}", 5.0)
        finally:
            server.shutdown()
            thread.join(5)
    assert (page is not None) is is_page
    assert fetch_page(f"127.0.0.1:{server.server_port}", 1.0) is None  # nobody is there any more
