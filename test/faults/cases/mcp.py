"""MCP servers, which requests name by URL, that hang, die, answer 10 MB or redirect to a private address."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from test.faults.case import Case
from test.faults.harness import FaultContext
from test.faults.reactions import responds
from test.media.fetch.image_host import answer, image_host_in_thread

REQUESTS = 12
HOST = "127.0.0.1"
FLAGS = ("--mcp_private_hosts", HOST, "--allow_http_mcp", "--mcp_timeout", "2", "--tool_call_parser", "hermes")
FAULTS = {
    "/dies": b"",
    "/breaks_off": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
    "/floods": answer(b" " * 10 * 2**20, "Content-Type: application/json"),
    "/redirects": answer(b"", "Location: http://169.254.169.254/", status=307),
}


def call_broken_servers(context: FaultContext) -> None:
    """While one hangs, other requests are served."""

    def ask(url: str) -> int:
        tool = {"type": "mcp", "server_label": "broken", "server_url": url, "require_approval": "never"}
        return context.server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 4, "tools": [tool]})[0]

    with (
        image_host_in_thread(lambda target: FAULTS.get(target), is_tls=False) as host,
        ThreadPoolExecutor(REQUESTS) as threads,
    ):
        hanging = [threads.submit(ask, host.url("/hangs", HOST, "http")) for _ in range(REQUESTS)]
        context.wait_until(lambda: host.num_open == REQUESTS)
        context.complete_text({"prompt": [501, 502, 503], "max_tokens": 4})
        assert not any(request.done() for request in hanging)
        context.statuses += [ask(host.url(path, HOST, "http")) for path in FAULTS]
        context.statuses += [request.result() for request in hanging]


CASES = [
    Case("MCP servers hang, die, flood and redirect", call_broken_servers, responds(424), flags=FLAGS, within_s=30.0)
]
