"""Measures any OpenAI-compatible server under load: latencies, throughput, goodput, sweeps, a report with plots.

    lightserve bench serve --url http://127.0.0.1:8000 --concurrency 1 8 32 --json results.json --html report.html

docs/benchmarking.md has the definitions and examples.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from lightserve.bench.client.arguments import Arguments, parse
from lightserve.bench.client.results import KIND, VERSION, Results, Run, save
from lightserve.bench.client.sweep import ServerProblemError, Sweep, make_sweep
from lightserve.bench.client.table import lines_of
from lightserve.bench.report.page import page_of
from lightserve.errors import LightserveError
from lightserve.utils.net import raise_fd_limit


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: the server could not be measured, or a run has no completed request. 2: wrong flags."""
    arguments = parse(argv)
    raise_fd_limit()
    try:
        results = measure(arguments)
    except (ServerProblemError, LightserveError, ValueError, OSError) as error:
        print(f"lightserve bench serve: {error}", file=sys.stderr)
        return 1
    _write(results, arguments)
    return 0 if all(run.completed for run in results.runs) else 1


def measure(arguments: Arguments) -> Results:
    sweep = make_sweep(arguments)
    flags = arguments.flags
    print(f"{sweep.model} at {arguments.base_url}, {flags.api}, dataset {flags.dataset}", flush=True)
    _warn_of_repeats(sweep)
    runs = _finished_runs(sweep)
    return Results(
        kind=KIND,
        version=VERSION,
        created=int(time.time()),
        label=flags.label or sweep.model,
        url=arguments.base_url,
        model=sweep.model,
        slo=arguments.slo,
        options=arguments.stored(),
        runs=runs,
    )


def _finished_runs(sweep: Sweep) -> list[Run]:
    """All runs, or those that were complete at Ctrl-C."""
    runs: list[Run] = []
    try:
        for run in sweep.runs():
            runs.append(run)
            print("\n".join(lines_of(run, sweep.arguments.flags.processes)), flush=True)
    except KeyboardInterrupt:
        if not runs:
            raise
        print(f"interrupted: {len(runs)} of {len(sweep.arguments.points)} runs are complete")
    return runs


def _warn_of_repeats(sweep: Sweep) -> None:
    flags = sweep.arguments.flags
    total = (flags.requests + flags.warmup) * len(sweep.arguments.points)
    if repeats := sweep.dataset.repeats(total):
        print(
            f"warning: the dataset has {total - repeats} prompts and {total} are needed: {repeats} are sent again, "
            "and a prefix cache may answer them"
        )


def _write(results: Results, arguments: Arguments) -> None:
    flags = arguments.flags
    if flags.json:
        save(results, flags.json)
        print(f"results: {flags.json}")
    if flags.html:
        flags.html.write_text(page_of(results))
        print(f"report: {flags.html}")


if __name__ == "__main__":
    sys.exit(main())
