"""Every fault there is, and a table of what came of it: ``make chaos``, or

    python -m test.faults --seed 1 [--only WORDS] [-- --model_dir DIR ...]

Flags after ``--`` replace the worker that makes up tokens by one with that model.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable

from test.faults.cases import CASES, START_CASES
from test.faults.stage import NULL_WORKER, Stage

ROW = "{:<46} {:<60} {:>8}  {}"


def attempt(name: str, reaction: str, run: Callable[[], float]) -> bool:
    try:
        print(ROW.format(name, reaction, f"{run():.2f}", "yes"), flush=True)
    except Exception:
        traceback.print_exc()
        print(ROW.format(name, reaction, "-", "NO"), flush=True)
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("worker", nargs="*", default=NULL_WORKER, help="flags of another worker")
    args = parser.parse_args()
    print(ROW.format(f"case (seed {args.seed})", "reaction", "seconds", "ok"))
    outcomes = []
    with Stage(args.worker) as stage:
        for case in CASES:
            if args.only in case.name:
                run = lambda case=case: case.run(stage, args.seed)  # noqa: E731
                outcomes.append(attempt(case.name, case.reaction.words, run))
    for start in START_CASES:
        if args.only in start.name:
            outcomes.append(attempt(start.name, start.reaction, start.run))
    print(f"{sum(outcomes)} of {len(outcomes)} as expected")
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
