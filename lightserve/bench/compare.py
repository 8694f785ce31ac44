"""Compares two results of ``lightserve bench serve``, run by run.

    lightserve bench compare before.json after.json --fail_over 5

Exit status 1: with --fail_over, a figure is worse by more than that percentage, or more requests failed. 2: wrong flags
or files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightserve.bench.client.arguments import with_underscores
from lightserve.bench.client.results import LATENCIES, Results, Run, load
from lightserve.config.parse import Parser
from lightserve.utils.terminal import Style

NOISE_PERCENT = 3.0  # two runs of one server on one machine differ by as much
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
COLORS = {"better": "green", "worse": "red"}
NOT_COMPARED = {"requests", "seconds", "timeout", "warmup", "processes", "model"}  # more of it is no other load


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both results. None: one of them lacks it."""

    name: str
    unit: str
    before: float | None
    after: float | None
    more_is_better: bool

    @property
    def percent(self) -> float | None:
        if self.before is None or self.after is None:
            return None
        if self.before == 0:
            return 0.0 if self.after == 0 else None
        return (self.after / self.before - 1) * 100

    @property
    def worse_percent(self) -> float:
        """How much worse; negative: better; 0: not comparable."""
        percent = self.percent or 0.0
        return -percent if self.more_is_better else percent

    def verdict(self, noise: float) -> str:
        if self.percent is None or abs(self.worse_percent) <= noise:
            return ""
        return "worse" if self.worse_percent > 0 else "better"


def changes(before: Run, after: Run) -> Iterator[Change]:
    rows = (
        ("requests", "/s", before.throughput.requests, after.throughput.requests),
        ("input tokens", "/s", before.throughput.input_tokens, after.throughput.input_tokens),
        ("output tokens", "/s", before.throughput.output_tokens, after.throughput.output_tokens),
        ("goodput", "/s", before.throughput.goodput, after.throughput.goodput),
    )
    for name, unit, old, new in rows:
        if old is not None or new is not None:
            yield Change(name, unit, old, new, more_is_better=True)
    for name in LATENCIES:
        old_row, new_row = before.latencies.get(name), after.latencies.get(name)
        for statistic in STATISTICS:
            old, new = (None if row is None else getattr(row, statistic) for row in (old_row, new_row))
            yield Change(f"{name.upper()} {statistic}", "ms", old, new, more_is_better=False)


def differing_options(before: Results, after: Results) -> Iterator[str]:
    for name in sorted((before.options.keys() | after.options.keys()) - NOT_COMPARED):
        old, new = before.options.get(name), after.options.get(name)
        if old != new:
            yield f"warning: the loads differ: --{name} {old} and {new}"


def failed_more(before: Run, after: Run) -> bool:
    return _failed_share(after) > _failed_share(before)


def _failed_share(run: Run) -> float:
    return run.failed / max(run.failed + run.completed, 1)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs are matched by rate and concurrency."""

    before: Results
    after: Results
    noise: float
    fail_over: float | None
    style: Style

    def lines(self) -> Iterator[str]:
        yield f"before: {self.before.label}, {self.before.model} at {self.before.url}"
        yield f"after:  {self.after.label}, {self.after.model} at {self.after.url}"
        yield from differing_options(self.before, self.after)
        for old, new in self._pairs():
            yield f"--- {new.name}"
            yield f"{'':<16}{'before':>12}{'after':>12}{'change':>10}"
            yield f"{'completed':<16}{old.completed:>12,}{new.completed:>12,}"
            yield self._coloured(
                f"{'failed':<16}{old.failed:>12,}{new.failed:>12,}", "worse" if failed_more(old, new) else ""
            )
            yield from (self._row(change) for change in changes(old, new))
        yield from self._only_in_one()

    def regressions(self) -> list[str]:
        """What is worse by more than ``fail_over`` percent."""
        if self.fail_over is None:
            return []
        messages = []
        for old, new in self._pairs():
            messages += [
                f"{new.name}: {change.name} is {change.worse_percent:.1f} % worse"
                for change in changes(old, new)
                if change.worse_percent > self.fail_over
            ]
            if failed_more(old, new):
                messages.append(f"{new.name}: {new.failed} requests failed, {old.failed} before")
        return messages

    @property
    def has_pairs(self) -> bool:
        return bool(self._pairs())

    def _pairs(self) -> list[tuple[Run, Run]]:
        known = {(run.rate, run.concurrency): run for run in self.before.runs}
        pairs = ((known.get((run.rate, run.concurrency)), run) for run in self.after.runs)
        return [(old, new) for old, new in pairs if old is not None]

    def _only_in_one(self) -> Iterator[str]:
        paired = {new.name for _, new in self._pairs()}
        for title, results in (("before", self.before), ("after", self.after)):
            names = [run.name for run in results.runs if run.name not in paired]
            if names:
                yield f"only in {title}, not compared: {'; '.join(names)}"

    def _row(self, change: Change) -> str:
        old, new = ("-" if value is None else f"{value:,.2f}" for value in (change.before, change.after))
        percent = "" if change.percent is None else f"{change.percent:+.1f} %"
        verdict = change.verdict(self.noise)
        name = f"{change.name} {change.unit}" if change.unit == "ms" else change.name + change.unit
        return self._coloured(f"{name:<16}{old:>12}{new:>12}{percent:>10}  {verdict}".rstrip(), verdict)

    def _coloured(self, text: str, verdict: str) -> str:
        return self.style.paint(COLORS[verdict], text) if verdict else text


def parser() -> Parser:
    made = Parser(
        prog="lightserve bench compare",
        usage="%(prog)s BEFORE AFTER [flags]",
        description="Compare two results of `lightserve bench serve --json`.",
    )
    made.add_argument("before", type=Path)
    made.add_argument("after", type=Path)
    made.add_argument("--fail_over", type=float, metavar="PERCENT", help="exit with 1 if a figure is this much worse")
    made.add_argument(
        "--noise", type=float, default=NOISE_PERCENT, metavar="PERCENT", help="smaller changes are unmarked"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    flags = parser().parse(with_underscores(sys.argv[1:] if argv is None else argv))
    try:
        results = load(flags.before), load(flags.after)
    except ValueError as error:
        print(f"lightserve bench compare: {error}", file=sys.stderr)
        return 2
    comparison = Comparison(*results, flags.noise, flags.fail_over, Style(sys.stdout))
    print("\n".join(comparison.lines()))
    if not comparison.has_pairs:
        print("lightserve bench compare: no run of one file is in the other", file=sys.stderr)
        return 2
    regressions = comparison.regressions()
    for regression in regressions:
        print(f"regression: {regression}")
    return 1 if regressions else 0


if __name__ == "__main__":
    sys.exit(main())
