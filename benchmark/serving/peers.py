"""Draws the README's plot of LightServe beside other servers, from measured figures.

    python -m benchmark.serving.peers docs/speed.json docs/images/speed.svg

The same data give the same bytes: a test compares the committed file with what this program makes.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

import msgspec

from lightserve.bench.report.scale import number
from lightserve.bench.report.svg import text

COLUMNS = 3
WIDTH, PANEL_WIDTH, PANEL_HEIGHT = 1080, 350, 166
MARGIN, GAP, TOP = 9, 6, 52
NAME_WIDTH, VALUE_WIDTH = 100, 100
ROW, BAR = 25, 15
# An image in a page follows the reader's setting by itself
CSS = """
text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1b1f27; font-size: 12.5px }
.page { fill: #ffffff } .panel { fill: #f6f7f9; stroke: #dfe3ea } .bar { fill: #9aa5b5 } .own { fill: #2563eb }
.h { font-size: 17px; font-weight: 650 } .load { font-weight: 600 } .soft { fill: #59616f } .strong { font-weight: 650 }
@media (prefers-color-scheme: dark) {
  text { fill: #e8ebf1 } .page { fill: #101318 } .panel { fill: #191d24; stroke: #2d333d }
  .bar { fill: #6b7687 } .own { fill: #6ea2ff } .soft { fill: #a3adbd }
}
"""


class Figure(msgspec.Struct, forbid_unknown_fields=True):
    """``values`` has the measured values of each server; several: of several runs."""

    load: str
    figure: str
    better: str  # lower or higher
    values: list[list[float]]

    def shown(self) -> list[float]:
        """The worst value of each server."""
        return [max(runs) if self.better == "lower" else min(runs) for runs in self.values]


class Speed(msgspec.Struct, forbid_unknown_fields=True):
    """The last server is ours."""

    title: str
    notes: list[str]
    servers: list[str]
    figures: list[Figure]


def read(path: Path) -> Speed:
    try:
        speed = msgspec.json.decode(path.read_bytes(), type=Speed)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    for figure in speed.figures:
        if len(figure.values) != len(speed.servers) or figure.better not in ("lower", "higher"):
            raise ValueError(
                f"{path}: {figure.load}, {figure.figure}: one list of values per server, better: lower|higher"
            )
    return speed


def draw(speed: Speed) -> str:
    rows = -(-(len(speed.figures) + 1) // COLUMNS)  # the notes need a place too
    height = TOP + rows * (PANEL_HEIGHT + GAP) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-labelledby="title desc">',
        f'<title id="title">{escape(speed.title)}</title>',
        f'<desc id="desc">{escape(_spoken(speed))}</desc>',
        f"<style>{CSS}</style>",
        f'<rect width="{WIDTH}" height="{height}" class="page"/>',
        text(MARGIN + 6, 33, speed.title, "h", "start"),
    ]
    for i, figure in enumerate(speed.figures):
        parts.append(_panel(speed.servers, figure, *_place(i)))
    return "\n".join([*parts, *_notes(speed), "</svg>\n"])


def _place(index: int) -> tuple[int, int]:
    row, column = divmod(index, COLUMNS)
    return MARGIN + column * (PANEL_WIDTH + GAP), TOP + row * (PANEL_HEIGHT + GAP)


def _panel(servers: list[str], figure: Figure, x: int, y: int) -> str:
    parts = [f'<rect x="{x}" y="{y}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" rx="8" class="panel"/>']
    parts.append(text(x + 14, y + 25, figure.load, "load", "start"))
    parts.append(text(x + 14, y + 44, f"{figure.figure} ({figure.better} is better)", "soft", "start"))
    room = PANEL_WIDTH - NAME_WIDTH - VALUE_WIDTH - 28
    longest = max(figure.shown())
    for i, (server, runs, value) in enumerate(zip(servers, figure.values, figure.shown(), strict=True)):
        is_own = i == len(servers) - 1
        top = y + 60 + i * ROW
        width = room * value / longest
        begin = x + 14 + NAME_WIDTH
        parts.append(text(x + 14, top + 12, server, "strong" if is_own else "", "start"))
        style = "own" if is_own else "bar"
        parts.append(f'<rect x="{begin}" y="{top}" width="{width:.1f}" height="{BAR}" rx="3" class="{style}"/>')
        label = ", ".join(number(run) for run in runs)
        parts.append(text(begin + width + 7, top + 12, label, "strong" if is_own else "", "start"))
    return "\n".join(parts)


def _notes(speed: Speed) -> list[str]:
    """Beside the last panel."""
    x, y = _place(len(speed.figures))
    return [text(x + 14, y + 30 + 22 * i, note, "soft", "start") for i, note in enumerate(speed.notes)]


def _spoken(speed: Speed) -> str:
    figures = []
    for figure in speed.figures:
        values = zip(speed.servers, figure.values, strict=True)
        row = "; ".join(f"{server} {', '.join(number(run) for run in runs)}" for server, runs in values)
        figures.append(f"{figure.load}, {figure.figure}: {row}.")
    return " ".join(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("image", type=Path)
    args = parser.parse_args()
    args.image.write_text(draw(read(args.data)))


if __name__ == "__main__":
    main()
