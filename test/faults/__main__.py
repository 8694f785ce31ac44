"""Runs all fault cases and prints a table of the results: ``make chaos``, or

    python -m test.faults --seed 1 [--core] [--only TEXT] [--slack FACTOR] [-- --model_dir DIR ...]

Flags after ``--`` replace the null worker with a model worker. ``--deterministic`` is added to them: otherwise a text
could depend on the batch in which a token was computed. With a GPU, a column shows its memory in MiB: before the server
started, before the fault, the peak until the reaction, and after the reaction.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from test.faults.case import Case, Outcome
from test.faults.cases import (
    ADAPTER_CASES,
    CASES,
    CORE,
    CORE_STARTS,
    DISAGGREGATION_CASES,
    DRAFT_CASES,
    GROUP_CASES,
    STAGE_CASES,
    START_CASES,
    STATE_CASES,
    TIER_CASES,
    WEIGHT_CASES,
    adapters,
    disaggregation,
    drafts,
    groups,
    kv_tiers,
    stages,
    states,
    weights,
)
from test.faults.resource_snapshot import HAS_GPU
from test.faults.server_pool import NULL_WORKER, ServerPool
from test.faults.start_case import StartCase

ROW = "{:<46} {:<63} {:>8}  {:<3} {}"


def attempt(name: str, reaction: str, run: Callable[[], tuple[float, str]]) -> bool:
    try:
        seconds, gpu = run()
    except Exception:
        traceback.print_exc()
        print(ROW.format(name, reaction, "-", "NO", "").rstrip(), flush=True)
        return False
    print(ROW.format(name, reaction, f"{seconds:.2f}", "yes", gpu).rstrip(), flush=True)
    return True


def run_case(case: Case, pool: ServerPool, seed: int, slack: float) -> tuple[float, str]:
    outcome = case.run(pool, seed, slack)
    return outcome.seconds, gpu_column(outcome)


def run_start(case: StartCase, worker: Sequence[str], slack: float) -> tuple[float, str]:
    return case.run(slack, worker), ""


def gpu_column(outcome: Outcome) -> str:
    gpu = outcome.gpu
    return f"{gpu.before_server} > {gpu.before_fault} > {gpu.peak} > {gpu.after}" if HAS_GPU else ""


def run_cases(cases: Sequence[Case], worker: Sequence[str], args: argparse.Namespace) -> list[bool]:
    with ServerPool(worker) as pool:
        return [
            attempt(case.name, case.reaction.words, partial(run_case, case, pool, args.seed, args.slack))
            for case in cases
            if args.only in case.name
        ]


def run_all(args: argparse.Namespace) -> list[bool]:
    worker = (*args.worker, "--deterministic") if args.worker else NULL_WORKER
    cases, starts = (CORE, CORE_STARTS) if args.core else (CASES, START_CASES)
    outcomes = run_cases(cases, worker, args)
    if not args.core:
        with tempfile.TemporaryDirectory() as base:
            outcomes += run_cases(ADAPTER_CASES, adapters.worker_flags(Path(base)), args)
        with tempfile.TemporaryDirectory() as base:
            outcomes += run_cases(WEIGHT_CASES, weights.worker_flags(Path(base)), args)
        with tempfile.TemporaryDirectory() as base:
            outcomes += run_cases(STAGE_CASES, stages.worker_flags(Path(base)), args)
        with tempfile.TemporaryDirectory() as base:
            outcomes += run_cases(GROUP_CASES, groups.worker_flags(Path(base)), args)
        with tempfile.TemporaryDirectory() as base:
            outcomes += run_cases(STATE_CASES, states.worker_flags(Path(base)), args)
        for drafter in drafts.DRAFTERS:
            with tempfile.TemporaryDirectory() as base:
                outcomes += run_cases(DRAFT_CASES, drafts.worker_flags(Path(base), drafter), args)
        with tempfile.TemporaryDirectory() as base:
            outcomes += run_cases(TIER_CASES, kv_tiers.worker_flags(Path(base)), args)
        with tempfile.TemporaryDirectory() as base:
            outcomes += run_cases(DISAGGREGATION_CASES, disaggregation.worker_flags(Path(base)), args)
    for start in starts:
        if args.only in start.name:
            outcomes.append(attempt(start.name, start.reaction, partial(run_start, start, worker, args.slack)))
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--core", action="store_true", help="run only the most important cases: 150 s on a GPU")
    parser.add_argument("--slack", type=float, default=1.0, help="factor for the time limits, for a loaded machine")
    parser.add_argument("worker", nargs="*", help="flags of a model worker")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server is stopped too
    begin_s = time.monotonic()
    print(ROW.format(f"case (seed {args.seed})", "reaction", "seconds", "ok", "GPU MiB" if HAS_GPU else "").rstrip())
    outcomes = run_all(args)
    print(f"{sum(outcomes)} of {len(outcomes)} as expected, {time.monotonic() - begin_s:.0f} s in all")
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
