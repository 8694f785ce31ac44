"""``lightserve engine``: a model without HTTP, for the gateways of a cluster (``lightserve serve --engines``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from lightserve.config import HttpConfig
from lightserve.config.commands import ENGINE_HTTP, NOT_OF_ENGINES
from lightserve.config.parse import Parser, parse_server, server_parser
from lightserve.errors import OptionError

PROG = "lightserve engine"
DESCRIPTION = (
    "Compute for servers on other machines (lightserve serve --engines). An engine has no HTTP. "
    "Flags may be written with dashes instead of underscores."
)


def main(argv: Sequence[str]) -> int:
    arguments().parse(argv)  # --help and wrong flags need no more than this
    if parse_server(argv, PROG).cluster.listen is None:
        raise OptionError("--listen is missing: the address for gateways, such as --listen tcp://10.0.0.2:9000")
    from lightserve.server import api_server  # here, because it imports tokenizers

    return api_server.main(argv, prog=PROG)


def arguments() -> Parser:
    parser = server_parser(PROG, common=("listen", "cluster_keys", "role"))
    parser.description = DESCRIPTION
    parser.hide({*NOT_OF_ENGINES, *(spec.name for spec in fields(HttpConfig) if spec.name not in ENGINE_HTTP)})
    return parser
