"""``lightserve serve``: the same as ``python -m lightserve.server.api_server``."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.config.parse import Parser, server_parser

PROG = "lightserve serve"


def main(argv: Sequence[str]) -> int:
    arguments().parse(argv)  # --help and wrong flags need no more than this
    from lightserve.server import api_server  # here, because it imports tokenizers

    return api_server.main(argv, prog=PROG)


def arguments() -> Parser:
    return server_parser(PROG)
