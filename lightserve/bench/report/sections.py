"""The parts of the report: the table of all runs, plots of a sweep, figures and plots of one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from lightserve.bench.client.results import LATENCIES, Latency, Results, Run
from lightserve.bench.client.table import notes_of
from lightserve.bench.report.scale import number
from lightserve.bench.report.svg import Line, Plot, histogram_plot, line_plot
from lightserve.bench.report.timeline import timeline_plot

STYLES = {"ttft": "c2", "tpot": "c1", "itl": "c3", "e2e": "c4"}
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def figure(title: str, plot: str, style: str = "") -> str:
    wide = f' class="{style}"' if style else ""
    return f"<figure{wide}><figcaption>{escape(title)}</figcaption>{plot}</figure>"


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML. The first cell of a row names the row."""
    cells = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    title = f"<caption>{escape(caption)}</caption>"
    return scrollable(caption, f"<table>{title}<thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>")


def scrollable(name: str, body: str) -> str:
    """On a narrow screen, also with the keyboard."""
    return f'<div class="scroll" role="group" tabindex="0" aria-label="{escape(name)}">{body}</div>'


def milliseconds(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


# all runs


def overview(results: Results) -> str:
    head = ["load", "completed", "failed", "requests/s", "output tok/s"]
    head += ["TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50", "E2E p99"]
    head += ["goodput/s"] if results.slo else []
    rows = [_overview_row(run, bool(results.slo)) for run in results.runs]
    return table("All runs; latencies in milliseconds", head, rows)


def _overview_row(run: Run, has_slo: bool) -> list[str]:
    failed = f'<span class="bad-text">{run.failed:,}</span>' if run.failed else "0"
    speed = run.throughput
    row = [escape(run.name), f"{run.completed:,}", failed, f"{speed.requests:.2f}", number(speed.output_tokens)]
    for name in ("ttft", "tpot", "e2e"):
        latency = run.latencies.get(name)
        row += ["-", "-"] if latency is None else [milliseconds(latency.p50), milliseconds(latency.p99)]
    return [*row, f"{speed.goodput or 0.0:.2f}"] if has_slo else row


def sweep_plots(results: Results) -> str:
    """Plots over the runs. Runs without a completed request have no point; the table shows them."""
    runs = sorted((run for run in results.runs if run.completed), key=lambda run: run.throughput.output_tokens)
    if len(runs) < 2:
        return ""
    figures = [_latency_against_throughput(runs, name) for name in ("ttft", "tpot", "e2e")]
    figures.append(_throughput_against_load(results, runs))
    return f'<h2>Latency against throughput</h2><div class="plots">{"".join(figures)}</div>'


def _latency_against_throughput(runs: list[Run], name: str) -> str:
    shown = [(run, run.latencies[name]) for run in runs if name in run.latencies]
    if not shown:
        return ""
    labels = [short_name(run) for run, _ in shown]
    lines = [
        Line(
            q, [(run.throughput.output_tokens, getattr(row, q)) for run, row in shown], style, labels, is_dashed=dashed
        )
        for q, style, dashed in (("p50", STYLES[name], False), ("p99", STYLES[name], True))
    ]
    title = f"{name.upper()} against throughput"
    points = "; ".join(
        f"{label}: p50 {number(row.p50)}, p99 {number(row.p99)} ms"
        for label, (_, row) in zip(labels, shown, strict=True)
    )
    plot = Plot(title, f"{LATENCIES[name]} of each run. {points}.", "output tokens/s", "ms", lines, True, True)
    return figure(f"{title} ({LATENCIES[name]})", line_plot(plot))


def short_name(run: Run) -> str:
    parts = [] if run.rate is None else [f"{run.rate:g}/s"]
    return ", ".join(parts + ([] if run.concurrency is None else [f"c={run.concurrency}"])) or "no limit"


def _throughput_against_load(results: Results, runs: list[Run]) -> str:
    by_rate = len({run.rate for run in runs}) > 1
    by = [(run.rate if by_rate else run.concurrency, run) for run in runs]
    limited = sorted(((load, run) for load, run in by if load is not None), key=lambda pair: pair[0])
    if len(limited) < 2:
        return ""
    x_label = "requests/s sent" if by_rate else "concurrency"
    labels = [short_name(run) for _, run in limited]
    points = [(float(load), run.throughput.output_tokens) for load, run in limited]
    spoken = "; ".join(f"{label}: {number(y)}" for label, (_, y) in zip(labels, points, strict=True))
    plot = Plot(
        "Throughput against load",
        f"Output tokens per second. {spoken}.",
        x_label,
        "output tokens/s",
        [Line("output tokens/s", points, "c1", labels, has_area=True)],
    )
    body = figure("Throughput against load", line_plot(plot))
    if not results.slo:
        return body
    lines = [
        Line("completed", [(float(load), run.throughput.requests) for load, run in limited], "c1", labels),
        Line("goodput", [(float(load), run.throughput.goodput or 0.0) for load, run in limited], "c3", labels),
    ]
    limits = ", ".join(f"{name.upper()} {number(ms)} ms" for name, ms in results.slo.items())
    good = Plot("Goodput against load", f"Requests per second within {limits}.", x_label, "requests/s", lines)
    return body + figure(f"Goodput: requests within {limits}", line_plot(good))


# one run


def run_section(run: Run, processes: int, is_open: bool) -> str:
    """Folded unless it is the only one: the table above has the figures of all."""
    notes = "".join(f"<p{style_of(note)}>{escape(note)}</p>" for note in notes_of(run, processes))
    title = "Timeline of requests"
    parts = [cards(run), notes, latency_table(run), distributions(run), over_time(run)]
    parts.append(figure(title, scrollable(title, timeline_plot(run)), "wide"))
    name = escape(run.name[0].upper() + run.name[1:])
    failed = f', <span class="bad-text">{run.failed:,} failed</span>' if run.failed else ""
    short = f'<span class="soft">{number(run.throughput.output_tokens)} output tok/s{failed}</span>'
    opened = " open" if is_open else ""
    return f'<details class="run"{opened}><summary>{name} {short}</summary>{"".join(parts)}</details>'


def style_of(note: str) -> str:
    return ' class="bad-text"' if note.startswith(("failed", "warning")) else ' class="soft"'


def cards(run: Run) -> str:
    speed = run.throughput
    ttft, tpot = run.latencies.get("ttft"), run.latencies.get("tpot")
    values = [
        ("output", f"{number(speed.output_tokens)} <small>tok/s</small>"),
        ("input", f"{number(speed.input_tokens)} <small>tok/s</small>"),
        ("requests", f"{speed.requests:.2f} <small>/s</small>"),
        ("TTFT p50, p99", _pair(ttft)),
        ("TPOT p50, p99", _pair(tpot)),
        ("completed", f"{run.completed:,} <small>in {run.seconds:.1f} s</small>"),
        ("failed", f'<span class="bad-text">{run.failed:,}</span>' if run.failed else "0"),
    ]
    if speed.goodput is not None and run.good_share is not None:
        values.append(("goodput", f"{speed.goodput:.2f} <small>/s, {run.good_share:.0%} in the SLO</small>"))
    return (
        '<div class="cards">'
        + "".join(f'<dl class="card"><dt>{name}</dt><dd>{value}</dd></dl>' for name, value in values)
        + "</div>"
    )


def _pair(latency: Latency | None) -> str:
    return "-" if latency is None else f"{milliseconds(latency.p50)}, {milliseconds(latency.p99)} <small>ms</small>"


def latency_table(run: Run) -> str:
    rows = [
        [f'{name.upper()} <span class="soft">{words}</span>', *_statistics(run.latencies[name])]
        for name, words in LATENCIES.items()
        if name in run.latencies
    ]
    return table("Latencies in milliseconds", ["", *STATISTICS], rows) if rows else ""


def _statistics(latency: Latency) -> Iterator[str]:
    for name in STATISTICS:
        yield f"{getattr(latency, name):,.2f}"


def distributions(run: Run) -> str:
    figures = []
    for name, words in LATENCIES.items():
        if name not in run.histograms:
            continue
        latency, histogram = run.latencies[name], run.histograms[name]
        title = f"Distribution of {name.upper()}"
        marks = [("p50", latency.p50), ("p90", latency.p90), ("p99", latency.p99)]
        caption = f"{words}: " + ", ".join(f"{mark} {number(value)} ms" for mark, value in marks)
        plot = Plot(title, caption, "ms", "% of values", marks=marks)
        figures.append(figure(title, histogram_plot(plot, histogram.edges, histogram.counts, STYLES[name])))
    return f'<div class="plots">{"".join(figures)}</div>' if figures else ""


def over_time(run: Run) -> str:
    series = run.series
    plots = (
        ("Output tokens per second", "tokens/s", series.output_tokens_per_s, "c1"),
        ("Requests in flight", "requests", series.in_flight, "c2"),
    )
    figures = []
    for title, unit, values, style in plots:
        points = [((i + 0.5) * series.step_s, value) for i, value in enumerate(values)]
        caption = f"Over {run.seconds:.1f} seconds; highest value {number(max(values, default=0.0))}."
        plot = Plot(title, caption, "seconds", unit, [Line(unit, points, style, has_area=True)], x_high=run.seconds)
        figures.append(figure(title, line_plot(plot)))
    return f'<div class="plots">{"".join(figures)}</div>'
