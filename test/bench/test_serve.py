"""``lightserve bench serve`` and ``bench compare`` against a server without a model."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from lightserve.bench import compare, serve
from lightserve.bench.client.results import Results, load, save
from lightserve.bench.report.page import page_of
from test.bench.fake_openai_server import Behaviour, fake_server

SMALL = ["--requests", "6", "--input_len", "16", "--output_len", "4"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Results and report of a sweep in which every fifth request is refused."""
    folder = tmp_path_factory.mktemp("bench")
    paths = folder / "results.json", folder / "report.html"
    with fake_server(Behaviour(fails_every=5)) as server:
        flags = ["--url", server.url, "--concurrency", "1", "3", "--warmup", "0", "--slo", "ttft:60000", "e2el:60000"]
        files = ["--json", str(paths[0]), "--html", str(paths[1]), "--api_key", "a-secret"]
        assert serve.main([*SMALL, *flags, *files]) == 0
    return paths


def test_a_sweep_is_measured_and_stored(swept: tuple[Path, Path]) -> None:
    results = load(swept[0])

    assert [(run.concurrency, run.completed, run.failed) for run in results.runs] == [(1, 5, 1), (3, 5, 1)]
    assert results.model == "fake"
    for run in results.runs:
        assert (run.input_tokens, run.output_tokens, run.token_counts) == (5 * 16, 5 * 4, {"usage": 5})
        assert run.good_share == pytest.approx(5 / 6)
        assert run.errors == {"HTTP 503: the fake server is full": 1}
        assert run.latencies.keys() == {"ttft", "tpot", "itl", "e2e"}
        assert len(run.requests) == 6
        assert sum(run.histograms["ttft"].counts) == 5


def test_results_have_no_key(swept: tuple[Path, Path]) -> None:
    assert all("a-secret" not in path.read_text() for path in swept)


def test_requests_are_streamed_completions_on_connections_that_stay_open() -> None:
    with fake_server() as server:
        flags = ["--url", f"{server.url}/v1/", "--extra-body", '{"top_k": 1}', "--header", "X-Name: value"]
        assert serve.main([*SMALL, *flags, "--concurrency=2", "--quiet"]) == 0

    assert len(server.bodies) == 6 + 1  # and one to warm up
    assert len({body["prompt"] for body in server.bodies}) == 7
    for body in server.bodies:
        rest = {name: value for name, value in body.items() if name != "prompt"}
        assert rest == {
            "model": "fake",
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "ignore_eos": True,
            "top_k": 1,
        }
    assert server.connections <= 1 + 1 + 2  # for /v1/models, to warm up, and two at once
    assert b"X-Name: value\r\n" in server.heads[0]


def test_a_chat_in_two_processes_sends_every_request_once(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        flags = ["--url", server.url, "--api", "chat", "--rate", "200", "--processes", "2", "--warmup", "0", "--quiet"]
        assert serve.main([*SMALL, *flags]) == 0

    assert len({body["messages"][0]["content"] for body in server.bodies}) == len(server.bodies) == 6
    assert "6 requests completed" in capsys.readouterr().out


def test_a_connection_that_the_server_closed_is_opened_again() -> None:
    with fake_server(Behaviour(drops_reused=True)) as server:
        assert serve.main([*SMALL, "--url", server.url, "--concurrency", "1", "--quiet", "--warmup", "0"]) == 0

    assert len(server.bodies) == 6


def test_failed_requests_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(Behaviour(fails_every=1)) as server:
        status = serve.main([*SMALL, "--url", server.url, "--warmup", "0", "--quiet"])
    out = capsys.readouterr().out

    assert status == 1  # nothing was measured
    assert "0 requests completed" in out
    assert "6 FAILED" in out
    assert "failed: 6 x HTTP 503: the fake server is full" in out


def test_a_stream_that_breaks_off_is_a_failed_request(tmp_path: Path) -> None:
    with fake_server(Behaviour(breaks_every=3)) as server:
        flags = ["--url", server.url, "--warmup", "0", "--concurrency", "1", "--json", str(tmp_path / "r.json")]
        assert serve.main([*SMALL, *flags]) == 0

    [run] = load(tmp_path / "r.json").runs
    assert (run.completed, run.failed) == (4, 2)
    assert list(run.errors) == ["ConnectionError: the server closed the connection"]


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--url", "http://127.0.0.1:1"], 1, "no server at http://127.0.0.1:1"),
        (["--url", "http://127.0.0.1:1", "--model", "m"], 1, "a warm-up request failed: ConnectionRefusedError"),
        (["--url", "nowhere", "--model", "m"], 1, "is no address of a server"),
        (["--url", "http://u:p@127.0.0.1:1", "--model", "m"], 1, "which results would store"),
        (["--dataset", "jsonl"], 2, "--dataset jsonl needs --dataset_path FILE"),
        (["--slo", "speed:3"], 2, "must be NAME:MILLISECONDS"),
        (["--rate", "0"], 2, "0 is not positive"),
        (["--inputlen", "5"], 2, "did you mean --input_len?"),
        (["--json", "/no/such/folder/r.json"], 2, "does not exist"),
    ],
)
def test_what_cannot_be_measured_is_one_error(
    flags: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = serve.main(flags)
    except SystemExit as stop:
        ended = int(str(stop.code))

    assert ended == status
    assert message in capsys.readouterr().err


# the report


class Tags(HTMLParser):
    """The elements of a page, and their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_report_is_one_file_whose_plots_have_titles(swept: tuple[Path, Path]) -> None:
    page = swept[1].read_text()
    tags = Tags(page).found

    assert not {tag for tag, _ in tags} & {"script", "link", "img", "iframe", "object"}
    assert not [attrs for _, attrs in tags if attrs.keys() & {"src", "href", "onclick", "onload"}]
    assert "url(" not in page
    plots = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(plots) >= 4 + 2 * (4 + 2 + 1)  # of the sweep, and of each run
    ids = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(ids) == len(set(ids)) == 2 * len(plots)
    for plot in plots:
        root = ElementTree.fromstring(plot)
        assert [child.tag for child in root[:2]] == ["title", "desc"]
        assert all(child.text for child in root[:2])
        assert "nan" not in plot
    assert "HTTP 503: the fake server is full" in page


def test_the_report_shows_what_a_server_says_as_text(swept: tuple[Path, Path]) -> None:
    attack = "</title><script>alert(1)</script>"
    results = load(swept[0])
    request = msgspec.structs.replace(results.runs[0].requests[0], error=attack)
    run = msgspec.structs.replace(results.runs[0], errors={attack: 1}, requests=[request])
    changed = msgspec.structs.replace(results, model=attack, label=attack, url=attack, runs=[run, run])

    tags = {tag for tag, _ in Tags(page_of(changed)).found}

    assert "script" not in tags


# compare


def faster(results: Results, factor: float) -> Results:
    runs = [
        msgspec.structs.replace(
            run,
            throughput=msgspec.structs.replace(run.throughput, output_tokens=run.throughput.output_tokens * factor),
        )
        for run in results.runs
    ]
    return msgspec.structs.replace(results, runs=runs)


@pytest.fixture
def pair(swept: tuple[Path, Path], tmp_path: Path) -> tuple[str, str]:
    """Results, and the same with 10 % less output."""
    save(faster(load(swept[0]), 0.9), tmp_path / "slower.json")
    return str(swept[0]), str(tmp_path / "slower.json")


def test_a_regression_is_marked_and_fails(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    before, after = pair

    statuses = [
        compare.main([before, after]),
        compare.main([before, after, "--fail_over", "5"]),
        compare.main([before, after, "--fail-over", "15"]),
        compare.main([after, before, "--fail_over", "5"]),
    ]
    out = capsys.readouterr().out

    assert statuses == [0, 1, 0, 0]
    assert re.search(r"output tokens/s .* -10\.0 %  worse\n", out)
    assert re.search(r"output tokens/s .* \+11\.1 %  better\n", out)
    assert "regression: concurrency 1: output tokens is 10.0 % worse" in out


def test_more_failed_requests_are_a_regression(pair: tuple[str, str], tmp_path: Path) -> None:
    results = load(Path(pair[0]))
    runs = [msgspec.structs.replace(run, failed=run.failed + 1) for run in results.runs]
    save(msgspec.structs.replace(results, runs=runs), tmp_path / "failing.json")

    assert compare.main([pair[0], str(tmp_path / "failing.json"), "--fail_over", "50"]) == 1


def test_runs_and_options_that_differ_are_named(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = load(Path(pair[0]))
    options = results.options | {"input_len": 99}
    save(msgspec.structs.replace(results, runs=results.runs[:1], options=options), tmp_path / "one.json")

    assert compare.main([pair[0], str(tmp_path / "one.json")]) == 0
    out = capsys.readouterr().out

    assert "the loads differ: --input_len 16 and 99" in out
    assert "only in before, not compared: concurrency 3" in out


def test_a_file_of_something_else_is_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"kind": "x"}))

    assert compare.main([pair[0], str(other)]) == 2
    assert compare.main([pair[0], str(tmp_path / "missing.json")]) == 2
