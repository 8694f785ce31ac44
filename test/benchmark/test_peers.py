"""The plot of speed is made from the figures of its table."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmark.serving.peers import draw, read
from lightserve.bench.report.scale import number

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "docs" / "speed.json"
IMAGE = ROOT / "docs" / "images" / "speed.svg"


def test_the_committed_plot_is_made_from_the_committed_figures() -> None:
    remedy = "run: python -m benchmark.serving.peers docs/speed.json docs/images/speed.svg"

    assert IMAGE.read_text() == draw(read(DATA)), remedy


def test_the_figures_of_the_plot_are_those_of_the_table() -> None:
    page = (ROOT / "docs" / "speed.md").read_text()

    for figure in read(DATA).figures:
        *others, own = [", ".join(map(number, runs)) for runs in figure.values]
        assert f"| {' | '.join(others)} | **{own}** |" in page, figure.load


def test_the_bar_of_several_runs_is_the_worst() -> None:
    shown = {figure.better: figure.shown()[-1] for figure in read(DATA).figures[2:4]}

    assert shown == {"lower": 222, "higher": 1572}


def test_the_plot_is_readable_without_seeing_it() -> None:
    root = ElementTree.parse(IMAGE).getroot()
    said = {child.tag.rpartition("}")[2]: child.text or "" for child in root}

    assert "Llama-3-8B" in said["title"]
    assert "ms per token: LightLLM 1.2 5.64; SGLang 0.5.17 4.77; vLLM 0.26 4.87; LightServe 4.26, 4.22." in said["desc"]
    assert "prefers-color-scheme: dark" in said["style"]


def test_a_figure_without_a_value_for_each_server_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    path.write_text(DATA.read_text().replace("[[5.64], ", "["))

    with pytest.raises(ValueError, match="1 stream, 128 in, 256 out, ms per token: one list of values per server"):
        read(path)
