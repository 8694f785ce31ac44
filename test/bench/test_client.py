"""The bench client: when latencies begin and end, what counts as a failure, what is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightserve.bench.client.arrivals import arrival_times
from lightserve.bench.client.connection import Target
from lightserve.bench.client.dataset import WORDS, FileDataset, Lengths, RandomDataset, read_jsonl, read_sharegpt
from lightserve.bench.client.load import LoadResult, Plan, PlannedRequest
from lightserve.bench.client.metrics import Judge, Point, summarize
from lightserve.bench.client.processes import shares_of
from lightserve.bench.client.record import Record
from lightserve.bench.client.results import Run
from lightserve.bench.client.stream import StreamedResponse
from lightserve.bench.client.table import lines_of
from lightserve.model_files.source import resolve
from lightserve.model_files.tokenizer.tokenizer import load_tokenizer

STREAM = b"text/event-stream"
DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text_event(text: str = " word", finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def usage_event(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})


def read(*reads: tuple[float, bytes], status: int = 200, content_type: bytes = STREAM) -> Record:
    """A record of a request sent at 100 s, whose response came in these reads."""
    record = Record(index=0, due=100.0, sent=100.0, event_times=[])
    response = StreamedResponse(record, keeps_text=True)
    response.start(status, content_type)
    for now, data in reads:
        response.feed(data, now)
    response.finish()
    record.ended = reads[-1][0] if reads else 100.0
    return record


def run_of(*records: Record, judge: Judge | None = None) -> Run:
    return summarize(LoadResult(100.0, list(records), 0.5), Point(None, 1), judge or Judge([8] * len(records)))


def test_latencies_are_those_of_vllms_client_also_with_several_tokens_in_an_event() -> None:
    whole = text_event() + text_event()
    record = read((101.0, text_event()), (101.5, text_event()), (103.0, whole), (103.1, usage_event(9) + DONE))

    run = run_of(record)

    assert run.latencies["ttft"].mean == pytest.approx(1000)
    assert run.latencies["e2e"].mean == pytest.approx(3000)  # the usage that follows has no token
    assert run.latencies["tpot"].mean == pytest.approx((3000 - 1000) / (9 - 1))
    assert record.itls_s == pytest.approx([0.5, 1.5, 0.0])
    assert run.tokens_per_event == pytest.approx(9 / 4)
    assert run.seconds == pytest.approx(3.1)
    assert run.throughput.output_tokens == pytest.approx(9 / 3.1)


def test_an_event_may_arrive_in_pieces() -> None:
    data = text_event() + text_event(finish_reason="stop")

    record = read((101.0, data[:20]), (102.0, data[20:-1]), (103.0, data[-1:]), (104.0, DONE.replace(b"\n", b"\r\n")))

    assert record.event_times == [102.0, 102.0]  # a line is complete at its first line end
    assert (record.error, record.finish_reason) == ("", "stop")


def test_the_role_of_a_chat_is_no_token() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    thought = event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]})
    answer = event({"choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]})

    record = read((100.5, role), (101.0, thought), (102.0, answer + DONE))

    assert record.event_times == [101.0, 102.0]
    assert record.text == "hmyes"


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (read((101.0, text_event())), "the stream ended early"),
        (read((101.0, DONE)), "the stream has no output"),
        (
            read((101.0, text_event() + event({"error": {"message": "out of memory"}}))),
            "error in the stream: out of mem",
        ),
        (read((101.0, b'data: {"choices": 5}\n\n' + DONE)), "not of the OpenAI schema"),
        (read((101.0, b"{}"), content_type=b"application/json"), "the response is not streamed"),
        (read((101.0, b'{"error": {"message": "no such model"}}'), status=404), "HTTP 404: no such model"),
        (read((101.0, b"<h1>Bad Gateway</h1>"), status=502), "HTTP 502: <h1>Bad Gateway</h1>"),
        (read(status=503), "HTTP 503: no body"),
    ],
)
def test_what_is_no_whole_stream_has_failed(record: Record, error: str) -> None:
    run = run_of(record)

    assert error in record.error
    assert (run.completed, run.failed, list(run.errors.values())) == (0, 1, [1])
    assert run.latencies == {}


def test_tokens_without_usage_are_counted_as_well_as_possible_and_the_source_is_named() -> None:
    short, full = text_event(finish_reason="stop"), text_event(finish_reason="length")
    records = [read((101.0, end + DONE)) for end in (short, full)]
    records[1].index = 1
    judge = Judge([8, 8], [20, 30])

    run = run_of(*records, judge=judge)
    counted = run_of(*records, judge=Judge([8, 8], tokenizer=load_tokenizer(resolve(None, needs_weights=False))))

    assert run.token_counts == {"number of events": 1, "length asked for": 1}
    assert (run.input_tokens, run.output_tokens) == (20 + 30, 1 + 8)
    assert "output by number of events 1, length asked for 1; input as asked for" in "\n".join(lines_of(run, 1))
    assert (counted.token_counts, counted.output_tokens) == ({"tokenizer": 2}, 2)


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    fast = read((100.1, text_event()), (100.2, text_event() + usage_event(2) + DONE))
    slow_start = read((100.9, text_event()), (101.0, text_event() + usage_event(2) + DONE))
    slow_tokens = read((100.1, text_event()), (101.1, text_event() + usage_event(2) + DONE))
    one_token = read((100.1, text_event() + usage_event(1) + DONE))
    failed = read(status=500)

    run = run_of(
        fast, slow_start, slow_tokens, one_token, failed, judge=Judge([2] * 5, slo={"ttft": 200.0, "tpot": 200.0})
    )

    assert run.good_share == 2 / 5
    assert run.throughput.goodput == pytest.approx(2 / run.seconds)
    assert (run.completed, run.failed) == (4, 1)


# when requests are sent


def test_arrivals_keep_the_rate_and_their_seed() -> None:
    times = {shape: arrival_times(400, 20.0, shape, seed=3) for shape in (0.2, 1.0, float("inf"))}
    spread = {shape: np.std(np.diff(values)) for shape, values in times.items()}

    assert all(values[-1] == pytest.approx(20.0) for values in times.values())
    assert spread[0.2] > spread[1.0] > spread[float("inf")] == pytest.approx(0.0)
    assert spread[1.0] == pytest.approx(1 / 20, rel=0.3)  # exponential intervals
    assert arrival_times(400, 20.0, 1.0, seed=3) == times[1.0] != arrival_times(400, 20.0, 1.0, seed=4)
    assert arrival_times(3, float("inf"), 1.0, seed=0) == [0.0] * 3


def test_processes_share_requests_and_concurrency() -> None:
    requests = [PlannedRequest(i, 0.0, b"") for i in range(10)]
    plan = Plan(Target("host", 80, False, b""), requests, concurrency=5)

    shares = shares_of(plan, 3)

    assert [share.concurrency for share in shares] == [2, 2, 1]
    assert sorted(request.index for share in shares for request in share.requests) == list(range(10))
    assert len(shares_of(plan, 8)) == 5  # a process without a slot would send nothing


# prompts


def test_no_random_prompt_is_sent_twice_and_prefixes_are_shared() -> None:
    dataset = RandomDataset(Lengths(16, 4, 0.5, prefix_len=20, num_prefixes=2), seed=0)

    first, second = dataset.take(8, 0), dataset.take(8, 1)
    prefixes = {tuple(prompt.text.split()[:20]) for prompt in first}

    assert len({prompt.text for prompt in first + second}) == 16
    assert len(prefixes) == 2
    assert prefixes.isdisjoint({tuple(prompt.text.split()[:20]) for prompt in second})
    assert dataset.take(8, 0) == first
    assert {8 <= len(prompt.text.split()) - 20 <= 24 for prompt in first} == {True}
    assert [prompt.input_len for prompt in first] == [len(prompt.text.split()) for prompt in first]


def test_a_random_prompt_has_as_many_tokens_as_asked_for() -> None:
    tokenizer = load_tokenizer(resolve(None, needs_weights=False))
    [prompt] = RandomDataset(Lengths(300, 4), seed=0).take(1, 0)

    assert [word for word in WORDS if len(tokenizer.encode(f" {word}", add_special_tokens=False)) != 1] == []
    assert len(tokenizer.encode(prompt.text, add_special_tokens=False)) == 300


def test_a_file_of_prompts_is_read_on_by_the_next_run(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "max_tokens": 3, "top_p": 0.5} for i in range(9)] + [{"body": {"messages": [{}]}}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    prompts = read_jsonl(path, output_len=64)
    dataset = FileDataset(prompts, seed=0)

    first, second = dataset.take(4, 0), dataset.take(6, 1)

    assert sorted(prompt.text for prompt in first + second) == ["", *(f"p{i}" for i in range(9))]
    assert (prompts[0].output_len, prompts[0].fields) == (3, {"top_p": 0.5})
    assert (prompts[9].output_len, prompts[9].messages) == (64, [{}])
    assert (dataset.repeats(10), dataset.repeats(13)) == (0, 3)


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')

    with pytest.raises(ValueError, match=r'prompts\.jsonl:2: a line must be an object with "prompt" or "messages"'):
        read_jsonl(path, 8)


def test_sharegpt_gives_questions_and_the_lengths_of_their_answers(tmp_path: Path) -> None:
    def conversation(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "x", "value": text} for text in texts]}

    path = tmp_path / "sharegpt.json"
    path.write_text(
        json.dumps([conversation("q" * 40, "a" * 80), conversation("q"), conversation("q" * 9000, "a" * 80)])
    )

    [prompt] = read_sharegpt(path, None, None)

    assert (prompt.text, prompt.output_len) == ("q" * 40, 20)
    assert read_sharegpt(path, 5, None)[0].output_len == 5
