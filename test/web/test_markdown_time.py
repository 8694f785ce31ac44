"""Inline Markdown takes linear time, whatever the text. Node runs the module of the page, if it is there."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from test.waiting import DEADLINE_S

CHAT = Path(__file__).parents[2] / "lightserve" / "httpserver" / "web" / "chat"
SIZE = 1900  # below the length at which a link is given up
# CPU time of a text with n characters and of one with n / 4; the fastest of several runs counts
MEASURE = """
import { inlineNodes } from "./markdown/markdown_inline.js";
const node = () => ({ append() {}, setAttribute() {} });
globalThis.document = { createElement: node, createElementNS: node, createTextNode: node };
const [begin, middle, end, size] = JSON.parse(process.argv[2]);
function seconds(n) {
  const text = (begin + middle.repeat(n / middle.length) + end).repeat(40);
  const before = process.cpuUsage();
  for (let i = 0; i < 20; i += 1) inlineNodes(text);
  const { user, system } = process.cpuUsage(before);
  return user + system;
}
const runs = Array.from({ length: 7 }, () => [seconds(size), seconds(size / 4)]);
console.log(Math.min(...runs.map(([whole]) => whole)) / Math.min(...runs.map(([, quarter]) => quarter)));
"""


@pytest.mark.parametrize(
    ("begin", "middle", "end"),
    [
        ("[a](", " ", ""),
        ("[a](", " ", "b"),
        ("[a](<", " ", ""),
        ("[a](b", " ", '"'),
        ("[a](b ", '"', ""),
        ("[a](", "(", ""),
        ("[a](", "()", ""),
        ("[a](", "(b)", " "),
        ("http://a", ".", "b "),
        ("http://a", ")", "b "),
        ("<http://", "a", " "),
        ("$a", "$ ", "b"),
        ("\\(", "\\[", "b"),
    ],
)
def test_a_link_takes_linear_time(tmp_path: Path, begin: str, middle: str, end: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is missing: apt-get install nodejs")
    shutil.copytree(CHAT, tmp_path, dirs_exist_ok=True)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "measure.js").write_text(MEASURE)

    texts = json.dumps([begin, middle, end, SIZE])
    command = [node, "measure.js", texts]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=DEADLINE_S)

    assert float(found.stdout) < 9  # linear: 4, quadratic: 16
