"""``lightserve cluster keygen DIR``: the keys with which gateways, engines and nodes of an engine know each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightserve.config.parse import Parser


def arguments() -> Parser:
    parser = Parser(
        prog="lightserve cluster",
        description="Make the keys of a cluster. Give DIR to engines, gateways and nodes as --cluster_keys.",
    )
    parser.add_argument("action", choices=["keygen"], help="keygen: write the keys of engines, gateways and nodes")
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder for the keys; it is created")
    return parser


def main(argv: Sequence[str]) -> int:
    args = arguments().parse(argv)
    from lightserve.links import keys  # here, because it imports zmq
    from lightserve.links.kv_secret import KV_CERTIFICATE, KV_SECRET

    paths = keys.generate(args.folder)
    for path in paths:
        print(path)
    print(f"engines need {keys.ENGINE_SECRET} and {keys.ALLOWED_GATEWAYS}")
    print(f"gateways need {keys.GATEWAY_SECRET} and {keys.ALLOWED_ENGINES}")
    print(f"engines with --role prefill or decode need {KV_SECRET} too")
    if args.folder / KV_CERTIFICATE in paths:
        print(f"with --cluster_tls they need {KV_CERTIFICATE} too")
    else:
        print(f"{KV_CERTIFICATE}, for --cluster_tls, was not made: this machine has no openssl")
    print(f"nodes of one engine (--nnodes) need {keys.NODE_SECRET}")
    return 0
