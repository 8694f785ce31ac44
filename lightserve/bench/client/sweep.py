"""Runs every point of a sweep against the server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightserve.bench.client.arguments import Arguments
from lightserve.bench.client.arrivals import arrival_times
from lightserve.bench.client.connection import target_of
from lightserve.bench.client.dataset import (
    Dataset,
    FileDataset,
    Lengths,
    Prompt,
    RandomDataset,
    read_jsonl,
    read_sharegpt,
)
from lightserve.bench.client.load import Plan, PlannedRequest, run_load
from lightserve.bench.client.metrics import Judge, Point, summarize
from lightserve.bench.client.processes import run_in_processes
from lightserve.bench.client.progress import RequestProgress
from lightserve.bench.client.record import Record
from lightserve.bench.client.request_body import PATHS, BodyOptions, bodies_of
from lightserve.bench.client.results import Run
from lightserve.model_files.source import resolve
from lightserve.model_files.tokenizer.tokenizer import Tokenizer, load_tokenizer

MODELS_S = 30.0  # until /v1/models must have answered


class ServerProblemError(Exception):
    """The server cannot be measured. The message says why."""


@dataclass(frozen=True, slots=True)
class Sweep:
    arguments: Arguments
    model: str
    dataset: Dataset
    tokenizer: Tokenizer | None

    def runs(self) -> Iterator[Run]:
        for number, point in enumerate(self.arguments.points):
            self._warm_up(number)
            yield self._run(number, point)

    def _run(self, number: int, point: Point) -> Run:
        flags = self.arguments.flags
        prompts = self.dataset.take(flags.requests, 2 * number)
        times = arrival_times(len(prompts), point.rate or float("inf"), flags.burstiness, flags.seed + number)
        plan = self._plan(prompts, times, point)
        title = f"run {number + 1} of {len(self.arguments.points)}"
        progress = None if flags.quiet else RequestProgress(title, len(prompts))
        on_done: Callable[[Record], None] = progress.count if progress else lambda record: None
        result = run_in_processes(plan, flags.processes, on_done)
        if progress:
            progress.finish()
        judge = Judge(
            [prompt.output_len for prompt in prompts],
            [prompt.input_len for prompt in prompts],
            self.arguments.slo,
            self.tokenizer,
        )
        return summarize(result, point, judge)

    def _warm_up(self, number: int) -> None:
        """Its prompts are no prompts of a run. The first failure ends the benchmark, with its reason."""
        count = self.arguments.flags.warmup
        prompts = self.dataset.take(count, 2 * number + 1)
        plan = self._plan(prompts, [0.0] * count, Point(None, None))
        for record in run_load(plan, lambda record: None).records:
            if record.error:
                raise ServerProblemError(f"a warm-up request failed: {record.error}")

    def _plan(self, prompts: list[Prompt], times: list[float], point: Point) -> Plan:
        flags = self.arguments.flags
        bodies = bodies_of(prompts, self._body_options())
        return Plan(
            target=target_of(self.arguments.base_url, PATHS[flags.api], self.arguments.headers),
            requests=[PlannedRequest(i, due, body) for i, (due, body) in enumerate(zip(times, bodies, strict=True))],
            concurrency=point.concurrency,
            stop_s=flags.seconds,
            timeout_s=flags.timeout,
            keeps_text=self.tokenizer is not None,
        )

    def _body_options(self) -> BodyOptions:
        flags = self.arguments.flags
        fields: dict[str, Any] = {"temperature": flags.temperature}
        if flags.dataset in ("random", "prefix") and not flags.no_ignore_eos:
            fields["ignore_eos"] = True  # the output has the length asked for
        return BodyOptions(flags.api, self.model, not flags.no_usage, fields | flags.extra_body)


def make_sweep(arguments: Arguments) -> Sweep:
    flags = arguments.flags
    source = None if flags.tokenizer is None else resolve(flags.tokenizer, needs_weights=False)
    tokenizer = None if source is None else load_tokenizer(source)
    dataset = _dataset(arguments, tokenizer)
    return Sweep(arguments, flags.model or _first_model(arguments), dataset, tokenizer)


def _dataset(arguments: Arguments, tokenizer: Tokenizer | None) -> Dataset:
    flags = arguments.flags
    if flags.dataset == "sharegpt":
        return FileDataset(read_sharegpt(flags.dataset_path, flags.output_len, tokenizer), flags.seed)
    if flags.dataset == "jsonl":
        return FileDataset(read_jsonl(flags.dataset_path, arguments.output_len), flags.seed)
    is_prefix = flags.dataset == "prefix"
    lengths = Lengths(
        flags.input_len,
        arguments.output_len,
        flags.range_ratio,
        flags.prefix_len if is_prefix else 0,
        flags.num_prefixes if is_prefix else 1,
    )
    return RandomDataset(lengths, flags.seed, tokenizer)


def _first_model(arguments: Arguments) -> str:
    url = f"{arguments.base_url}/v1/models"
    try:
        request = urllib.request.Request(url, headers=arguments.headers)
        with urllib.request.urlopen(request, timeout=MODELS_S) as response:
            return str(json.load(response)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        raise ServerProblemError(f"{url} answered {error.code} {error.reason}; give --model or --api_key") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ServerProblemError(f"no server at {arguments.base_url}: {reason}; start one or change --url") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ServerProblemError(f"{url} names no model; give --model NAME") from error
