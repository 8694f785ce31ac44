"""``lightserve doctor``: what this machine has, what would be fast on it, and what is missing. One line each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from lightserve.cli.machine import CHECKS, Finding
from lightserve.config.parse import Parser
from lightserve.utils.terminal import Style

WIDTH = 10  # of the names
MARKS = {True: ("green", "ok"), False: ("yellow", "!!")}


def arguments() -> Parser:
    parser = Parser(prog="lightserve doctor", description="Report what this machine has, and what is missing.")
    parser.add_argument("--port", type=int, metavar="N", default=8000, help="port that the server shall listen on")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 if the server can start here, else 1. What is only slower or smaller is no failure."""
    args = arguments().parse(argv)
    style = Style(sys.stdout)
    can_serve = True
    for name, check in CHECKS.items():
        finding = _run(check, args.port)
        can_serve = can_serve and not finding.is_fatal
        print(line_of(name, finding, style), flush=True)
    return 0 if can_serve else 1


def _run(check: Callable[[int], Finding], port: int) -> Finding:
    try:
        return check(port)
    except Exception as error:
        return Finding(f"cannot be checked ({type(error).__name__}: {error})")


def line_of(name: str, finding: Finding, style: Style) -> str:
    color, mark = MARKS[not finding.remedy]
    if finding.is_fatal:
        color = "red"
    remedy = f": {finding.remedy}" if finding.remedy else ""
    return f"{style.paint(color, mark)}  {name:{WIDTH}} {finding.text}{remedy}"
