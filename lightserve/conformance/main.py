"""``lightserve conformance --device NAME``: what a vendor runs before a device is used.

It compares every operator with its definition in every dtype, tries copies, graphs, memory and ranks, computes a tiny
model and starts a server. It exits with 1 if anything fails. What is missing is no failure: definitions compute it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightserve.config.parse import Parser

SECTIONS = ("ops", "device", "ranks", "model", "speed")


def arguments() -> Parser:
    parser = Parser(prog="lightserve conformance", description="Check that a device computes what models need.")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or one of a package; default: the best one here")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="some sections")
    parser.add_argument("--ops", nargs="+", metavar="NAME", default=[], help="some operators; default: all")
    parser.add_argument(
        "--ops_backend", nargs="+", metavar="NAME", default=[], help="operators of packages, as for the server"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse(argv)
    from lightserve.common.device import pick_device  # takes seconds
    from lightserve.conformance.suite import Suite

    platform = pick_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        suite = Suite(platform, Path(folder), args.ops, args.ops_backend)
        num_failed = sum(getattr(suite, section)() for section in _in_order(args.only))
    print(f"\n{num_failed or 'nothing'} failed on the device {platform.name}")
    return 1 if num_failed else 0


def _in_order(sections: Iterable[str]) -> list[str]:
    return [section for section in SECTIONS if section in sections]


if __name__ == "__main__":
    sys.exit(main())
