"""Measures two trees of the repository under the same loads, in turn, and prints what moved beyond noise.

    git archive --prefix base/ main~20 | tar x -C /tmp
    python -m benchmark.guard --before /tmp/base --before_name main~20
    python -m benchmark.guard --before /tmp/base --quick      # a tiny model, to try it on a CPU

Each round starts the server of the one tree, runs every load and stops it, then the same with the other. The client
is that of this tree. A change counts if it exceeds what runs of the same code differ by (Student's t, 95 %), and 1 %.
Of some twenty figures one may do so by chance: measure again before you search. Exit status 1: a figure is worse.
On a machine with other work, times say little; the CPU time of a token says most.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmark.guard.loads import CARD_LOADS, QUICK_LOADS, Load
from benchmark.guard.side import Figures, Side
from benchmark.guard.table import judge, lines_of, log_line, moved
from benchmark.models import LLAMA3_8B, TINY, save_word_model
from lightserve.bench.client.sweep import ServerProblemError
from lightserve.utils.net import raise_fd_limit

TREE = Path(__file__).resolve().parents[2]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--before", type=Path, required=True, help="folder of the tree to compare with")
    made.add_argument("--before_name", default="before", help="of its commit, for the log")
    made.add_argument("--after", type=Path, default=TREE, help="default: this tree")
    made.add_argument("--after_name", default="after")
    made.add_argument("--rounds", type=int, default=2, help="runs of each side; default: 2")
    made.add_argument("--limit_s", type=float, default=float("inf"), help="begin no round that would end later")
    made.add_argument("--loads", nargs="+", help="only these")
    made.add_argument("--quick", action="store_true", help="a tiny model and short loads")
    made.add_argument("--machine", default=platform.machine(), help="its name, for the log")
    return made


def loads_of(args: argparse.Namespace) -> list[Load]:
    if args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; a comparison needs at least 1, and 2 for its noise")
    loads = {load.name: load for load in (QUICK_LOADS if args.quick else CARD_LOADS)}
    names = args.loads or loads
    if unknown := sorted(set(names) - loads.keys()):
        raise ValueError(f"--loads: there is no {', '.join(unknown)}; there are {', '.join(loads)}")
    return [loads[name] for name in names]


def sides_of(args: argparse.Namespace, folder: Path) -> tuple[Side, Side]:
    before = Side(args.before_name, args.before.resolve(), folder / "before")
    after = Side(args.after_name, args.after.resolve(), folder / "after")
    for side in (before, after):
        side.check()
    if before.has_library != after.has_library:
        print("warning: one tree has a compiled C library and the other has none; on a CPU they are no match")
    return before, after


def measure(sides: tuple[Side, Side], flags: list[str], loads: list[Load], args: argparse.Namespace) -> list[Figures]:
    """Before and after in turn. Every run is printed, so that a cut session has them too."""
    begin, figures = time.monotonic(), []
    for number in range(args.rounds):
        elapsed_s = time.monotonic() - begin
        if number and elapsed_s * (number + 1) / number > args.limit_s:
            print(f"{number} of {args.rounds} rounds: another would end after {args.limit_s:.0f} s")
            break
        for side in sides:
            figures.append(side.measure(flags, loads, number))
            print(f"{side.name}, {time.monotonic() - begin:.0f} s: {_short(figures[-1])}", flush=True)
    return figures


def _short(figures: Figures) -> str:
    return ", ".join(f"{load} {figure} {value:.2f}" for (load, figure), value in figures.items())


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    raise_fd_limit()
    try:
        with tempfile.TemporaryDirectory() as folder:
            loads, sides = loads_of(args), sides_of(args, Path(folder))
            model = save_word_model(Path(folder) / "model", TINY if args.quick else LLAMA3_8B)
            figures = measure(sides, ["--model_dir", str(model), "--load_format", "dummy"], loads, args)
    except (ValueError, RuntimeError, ServerProblemError) as error:
        print(f"guard: {error}", file=sys.stderr)
        return 2
    judged = judge(figures[::2], figures[1::2])
    print("\n".join([*lines_of(judged), "", log_line((args.before_name, args.after_name), args.machine, judged)]))
    return 1 if any("worse" in change for change in moved(judged)) else 0


if __name__ == "__main__":
    sys.exit(main())
