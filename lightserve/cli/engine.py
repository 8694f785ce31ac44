"""``lightserve engine``: a model without HTTP, for the gateways of a cluster (``lightserve serve --engines``)."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.errors import OptionError
from lightserve.server.args import Parser, parse_server, server_parser

PROG = "lightserve engine"


def main(argv: Sequence[str]) -> int:
    arguments().parse(argv)  # --help and wrong flags need no more than this
    if parse_server(argv, PROG).cluster.listen is None:
        raise OptionError("--listen is missing: the address for gateways, such as --listen tcp://10.0.0.2:9000")
    from lightserve.server import api_server  # here, because it imports tokenizers

    return api_server.main(argv, prog=PROG)


def arguments() -> Parser:
    return server_parser(PROG)
