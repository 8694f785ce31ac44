"""The figures of both sides as a table, and as the line of the log."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from statistics import median

from benchmark.guard.loads import MORE_IS_BETTER
from benchmark.guard.noise import Judged
from benchmark.guard.side import Figures

IN_LOG = ("tokens/s", "TPOT p50", "TTFT p99")  # the first of these that a load has
HEAD = f"{'load':8}{'figure':10}{'before':>11}{'after':>11}{'change':>10}{'noise':>9}  "


def judge(before: list[Figures], after: list[Figures]) -> dict[tuple[str, str], Judged]:
    """In the order of measurement. A first start is in one round only."""
    names = dict.fromkeys(name for figures in before for name in figures)
    return {
        name: Judged(
            [figures[name] for figures in before if name in figures],
            [figures[name] for figures in after if name in figures],
            name[1] in MORE_IS_BETTER,
        )
        for name in names
    }


def lines_of(judged: dict[tuple[str, str], Judged]) -> Iterator[str]:
    yield HEAD + "runs before; after"
    for (load, figure), values in judged.items():
        noise = "" if values.noise_percent is None else f"{values.noise_percent:.1f} %"
        runs = "; ".join(" ".join(f"{run:.2f}" for run in side) for side in (values.before, values.after))
        row = f"{load:8}{figure:10}{median(values.before):11,.2f}{median(values.after):11,.2f}"
        yield f"{row}{values.percent:+9.1f}%{noise:>9}  {values.verdict:6} {runs}"


def moved(judged: dict[tuple[str, str], Judged]) -> list[str]:
    return [
        f"{load} {figure} {values.percent:+.1f} %, {values.verdict}"
        for (load, figure), values in judged.items()
        if values.verdict
    ]


def log_line(names: tuple[str, str], machine: str, judged: dict[tuple[str, str], Judged]) -> str:
    """A row of the table in docs/log.md."""
    figures: dict[str, str] = {}
    for (load, figure), values in judged.items():
        if figure in IN_LOG:
            figures.setdefault(load, f"{load} {median(values.after):,.2f} {figure}")
    cells = [str(datetime.date.today()), names[1], names[0], machine, "; ".join(figures.values())]
    return f"| {' | '.join([*cells, '; '.join(moved(judged)) or 'nothing'])} |"
