"""``lightserve run-batch -i IN -o OUT``: run a file of requests on a temporary server or a running one, and exit.

Results are appended to OUT.partial as they come, and OUT appears when all are there. A run that was interrupted goes on
where it stopped: requests whose custom_id is in OUT.partial are not sent again.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from lightserve.batches.entry import response_entry
from lightserve.batches.line import LineRequest, check_file, parse_line, read_lines
from lightserve.cli.run_batch.client import BatchClient
from lightserve.cli.run_batch.temporary_server import temporary_server
from lightserve.config.parse import Parser
from lightserve.errors import InvalidRequestError, LightserveError
from lightserve.server.keys import KEY_VARIABLE
from lightserve.utils.progress import Progress

SHOWN_ERRORS = 10
MAX_LINE_BYTES = 16 * 2**20
FAILED = 1  # exit code: some requests have errors


class Counts(NamedTuple):
    completed: int
    failed: int


def arguments() -> Parser:
    parser = Parser(
        prog="lightserve run-batch",
        usage="%(prog)s -i IN.jsonl -o OUT.jsonl [--url URL | MODEL and flags of lightserve serve]",
        description="Run the requests of a file, one JSON object a line, and write their results to another. "
        "Further arguments are flags of lightserve serve: they start a server for this run.",
    )
    in_names, out_names = ("-i", "--input_file", "--input-file"), ("-o", "--output_file", "--output-file")
    parser.add_argument(*in_names, dest="input", metavar="FILE", required=True, help="requests")
    parser.add_argument(*out_names, dest="output", metavar="FILE", required=True, help="results")
    parser.add_argument("--url", metavar="URL", help="a running server; default: start one for the run")
    parser.add_argument("--api_key", "--api-key", metavar="KEY", help=f"key of --url; default: ${KEY_VARIABLE}")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="requests at once")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args, server_flags = arguments().parse_known_args(argv)
    if args.concurrency < 1:
        raise InvalidRequestError(f"--concurrency {args.concurrency}: must be at least 1")
    if args.url is not None and server_flags:
        raise InvalidRequestError(f"{server_flags[0]}: --url has a model already; leave out one of the two")
    source, output = Path(args.input), Path(args.output)
    total = _checked(source)
    with contextlib.ExitStack() as exits:
        url = args.url or exits.enter_context(temporary_server(server_flags))
        client = BatchClient(url, args.api_key or os.environ.get(KEY_VARIABLE), args.concurrency)
        counts = _run(client, source, output, total)
    print(f"{output}: {counts.completed} completed, {counts.failed} failed", file=sys.stderr)
    return FAILED if counts.failed else 0


def _checked(source: Path) -> int:
    """The number of requests. All wrong lines are reported before any request is sent."""
    try:
        check = check_file(source, None, MAX_LINE_BYTES)
    except OSError as error:
        raise LightserveError(f"-i {source}: {error.strerror}") from error
    if not check.errors:
        return check.num_lines
    texts = [f"  line {error['line']}: {error['message']}" for error in check.errors[:SHOWN_ERRORS]]
    raise InvalidRequestError("\n".join([f"{source}: no request was sent, because lines are wrong:", *texts]))


def _run(client: BatchClient, source: Path, output: Path, total: int) -> Counts:
    partial = output.with_name(f"{output.name}.partial")
    counts = _counts_of(partial)
    requests = (parse_line(line.text) for line in read_lines(source))
    unfinished = (request for request in requests if request.custom_id not in counts)
    completed = sum(not is_error for is_error in counts.values())
    with partial.open("ab") as sink, Progress("requests", total, unit="items") as progress:
        progress.resume_at(len(counts))
        for request, status, request_id, body in client.responses(unfinished):
            entry = _entry(request, status, request_id, body)
            sink.write(entry + b"\n")
            sink.flush()
            completed += status < 400
            progress.advance(1)
        os.fsync(sink.fileno())
    partial.replace(output)
    return Counts(completed, total - completed)


def _entry(request: LineRequest, status: int, request_id: str, body: object) -> bytes:
    return response_entry("openai", request.custom_id, status, request_id, body).text


def _counts_of(partial: Path) -> dict[str, bool]:
    """Whether each request of an interrupted run failed, by custom_id. A line that was cut off is removed."""
    if not partial.exists():
        return {}
    with partial.open("r+b") as file:
        lines = file.read().split(b"\n")
        file.truncate(sum(len(line) + 1 for line in lines[:-1]))
    results = [orjson.loads(line) for line in lines[:-1]]
    return {result["custom_id"]: result["response"]["status_code"] >= 400 for result in results}
