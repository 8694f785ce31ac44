"""Every fault there is, and a table of what came of it: ``make chaos``, or

    python -m test.faults --seed 1 [--core] [--only WORDS] [--slack TIMES] [-- --model_dir DIR ...]

Flags after ``--`` replace the worker that makes up tokens by one with that model. ``--deterministic`` is added to them:
else a text could differ by the batch that a token was computed in, fault or not. Where there is a GPU, a column has its
memory in MiB: before the server started, before the fault, at most until the reaction, and after it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from test.faults.case import Case, Outcome
from test.faults.cases import CASES, CORE, CORE_STARTS, START_CASES
from test.faults.census import HAS_GPU
from test.faults.stage import NULL_WORKER, Stage
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


def run_case(case: Case, stage: Stage, seed: int, slack: float) -> tuple[float, str]:
    outcome = case.run(stage, seed, slack)
    return outcome.seconds, gpu_column(outcome)


def run_start(case: StartCase, worker: Sequence[str], slack: float) -> tuple[float, str]:
    return case.run(slack, worker), ""


def gpu_column(outcome: Outcome) -> str:
    gpu = outcome.gpu
    return f"{gpu.before_server} > {gpu.before_fault} > {gpu.peak} > {gpu.after}" if HAS_GPU else ""


def run_all(args: argparse.Namespace) -> list[bool]:
    worker = (*args.worker, "--deterministic") if args.worker else NULL_WORKER
    cases, starts = (CORE, CORE_STARTS) if args.core else (CASES, START_CASES)
    outcomes = []
    with Stage(worker) as stage:
        for case in cases:
            if args.only in case.name:
                run = partial(run_case, case, stage, args.seed, args.slack)
                outcomes.append(attempt(case.name, case.reaction.words, run))
    for start in starts:
        if args.only in start.name:
            outcomes.append(attempt(start.name, start.reaction, partial(run_start, start, worker, args.slack)))
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--core", action="store_true", help="the few that matter most, in 150 s on a GPU")
    parser.add_argument("--slack", type=float, default=1.0, help="as much time as cases want, on a busy machine")
    parser.add_argument("worker", nargs="*", help="flags of another worker")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # not without ending the server
    begin_s = time.monotonic()
    print(ROW.format(f"case (seed {args.seed})", "reaction", "seconds", "ok", "GPU MiB" if HAS_GPU else "").rstrip())
    outcomes = run_all(args)
    print(f"{sum(outcomes)} of {len(outcomes)} as expected, {time.monotonic() - begin_s:.0f} s in all")
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
