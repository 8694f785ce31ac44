"""A small writer of SVG plots. Colours are CSS classes, so that a page decides about dark and light."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from lightserve.bench.report.scale import Scale, number, scale_from_zero, scale_of

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 46
_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    style: str = "c1"  # a class of the page: c1, c2, ...
    labels: Sequence[str] = ()  # beside the points
    has_area: bool = False
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    description: str  # what a reader who cannot see the plot needs
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    may_be_log: bool = False
    names_points: bool = False  # with the labels of the last line
    x_high: float | None = None  # where the x axis ends; None: at a round number
    marks: Sequence[tuple[str, float]] = field(default=())  # vertical lines at x, with names


def svg(width: int, height: int, title: str, description: str, body: str) -> str:
    """``title`` and ``description`` are read by screen readers."""
    number_of_plot = next(_ids)
    title_id, desc_id = f"t{number_of_plot}", f"d{number_of_plot}"
    return (
        f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-labelledby="{title_id} {desc_id}">'
        f'<title id="{title_id}">{escape(title)}</title><desc id="{desc_id}">{escape(description)}</desc>{body}</svg>'
    )


def reset_ids() -> None:
    """A page starts with the same ids each time, so that the same results give the same bytes."""
    global _ids
    _ids = itertools.count(1)


def text(x: float, y: float, content: str, style: str = "tick", anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(content)}</text>'


def line_plot(plot: Plot) -> str:
    xs = [x for line in plot.lines for x, _ in line.points]
    ys = [y for line in plot.lines for _, y in line.points]
    x_scale = scale_from_zero(xs, LEFT, WIDTH - RIGHT)
    if plot.x_high:
        x_scale = Scale(0.0, plot.x_high, LEFT, WIDTH - RIGHT)
    choose = scale_of if plot.may_be_log else scale_from_zero
    y_scale = choose(ys, HEIGHT - BOTTOM, TOP)
    body = axes(plot, x_scale, y_scale) + legend(plot.lines)
    body += "".join(_line(line, x_scale, y_scale, plot) for line in plot.lines)
    if plot.names_points:
        body += _point_names(plot.lines[-1], x_scale, y_scale)
    return svg(WIDTH, HEIGHT, plot.title, plot.description, body)


def axes(plot: Plot, x_scale: Scale, y_scale: Scale) -> str:
    parts = []
    for tick in y_scale.ticks():
        y = y_scale(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(text(LEFT - 7, y + 4, number(tick), anchor="end"))
    base = HEIGHT - BOTTOM
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}" class="axis"/>')
    for tick in x_scale.ticks():
        x = x_scale(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}" class="axis"/>')
        parts.append(text(x, base + 17, number(tick)))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, plot.x_label, "label"))
    unit = f"{plot.y_label}, log scale" if y_scale.is_log else plot.y_label
    parts.append(text(LEFT - 54, 16, unit, "label", "start"))
    return "".join(parts)


def legend(lines: Sequence[Line]) -> str:
    """At the top right; a single line needs none."""
    if len(lines) < 2:
        return ""
    parts, x = [], WIDTH - RIGHT
    for line in reversed(lines):
        parts.append(text(x, 16, line.name, "key", "end"))
        x -= 7 * len(line.name) + 8
        dash = ' stroke-dasharray="4 3"' if line.is_dashed else ""
        parts.append(f'<line x1="{x - 16}" x2="{x}" y1="12" y2="12" class="line {line.style}"{dash}/>')
        x -= 28
    return "".join(parts)


def _line(line: Line, x_scale: Scale, y_scale: Scale, plot: Plot) -> str:
    places = [(x_scale(x), y_scale(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="4 3"' if line.is_dashed else ""
    parts = []
    if line.has_area and places:
        base = HEIGHT - BOTTOM
        corners = f"{places[0][0]:.1f},{base} {path} {places[-1][0]:.1f},{base}"
        parts.append(f'<polygon points="{corners}" class="area {line.style}"/>')
    parts.append(f'<polyline points="{path}" class="line {line.style}"{dash}/>')
    parts += _points(line, places, plot)
    return "".join(parts)


def _points(line: Line, places: Sequence[tuple[float, float]], plot: Plot) -> Iterator[str]:
    """A circle for each labelled point, with its values as a tooltip."""
    for label, (px, py), (x, y) in zip(line.labels, places, line.points, strict=False):
        tip = f"{line.name}, {label}: {number(y)} {plot.y_label} at {number(x)} {plot.x_label}"
        attributes = f'cx="{px:.1f}" cy="{py:.1f}" r="4"'
        yield f'<circle {attributes} class="dot {line.style}"><title>{escape(tip)}</title></circle>'


def _point_names(line: Line, x_scale: Scale, y_scale: Scale) -> str:
    """Above the points of the last line. A name that would cover the one before is left out."""
    parts, free_x = [], -100.0
    for label, (x, y) in zip(line.labels, line.points, strict=False):
        half = 3.2 * len(label)
        px = min(x_scale(x), WIDTH - RIGHT - half)
        if px - half > free_x:
            parts.append(text(px, y_scale(y) - 9, label, "point"))
            free_x = px + half + 4
    return "".join(parts)


def histogram_plot(plot: Plot, edges: Sequence[float], counts: Sequence[int], style: str) -> str:
    """Bars between ``edges``; ``plot.marks`` are percentiles."""
    total = max(sum(counts), 1)
    low, high = edges[0], edges[-1]
    margin = (high - low) * 0.02
    x_scale = Scale(low - margin, high + margin, LEFT, WIDTH - RIGHT)
    y_scale = scale_from_zero([100 * count / total for count in counts], HEIGHT - BOTTOM, TOP + 24)
    body = axes(plot, x_scale, y_scale)
    base = HEIGHT - BOTTOM
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        x, width, y = x_scale(left), x_scale(right) - x_scale(left), y_scale(100 * count / total)
        tip = f"{number(left)} to {number(right)} {plot.x_label}: {count:,}"
        bar = f'x="{x + 0.5:.1f}" y="{y:.1f}" width="{max(width - 1, 0.5):.1f}" height="{base - y:.1f}"'
        body += f'<rect {bar} class="bar {style}"><title>{escape(tip)}</title></rect>' if count else ""
    return svg(WIDTH, HEIGHT, plot.title, plot.description, body + _marks(plot, x_scale))


def _marks(plot: Plot, x_scale: Scale) -> str:
    """Vertical lines. A name that would cover the one before is left out; its line has a tooltip."""
    parts, free_x = [], -100.0
    for name, value in plot.marks:
        x = x_scale(min(value, x_scale.high))
        tip = f"<title>{escape(f'{name}: {number(value)} {plot.x_label}')}</title>"
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP + 18}" y2="{HEIGHT - BOTTOM}" class="mark">{tip}</line>'
        )
        if x - free_x > 30:
            parts.append(text(x, TOP + 13, name, "key"))
            free_x = x
    return "".join(parts)
