"""The flags of ``lightserve bench serve``."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightserve.bench.client.dataset import DATASETS
from lightserve.bench.client.metrics import Point
from lightserve.bench.client.request_body import PATHS
from lightserve.config.parse import Parser

SLO_NAMES = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2e", "e2el": "e2e"}  # e2el: vLLM's name
DEFAULT_CONCURRENCY = 8
SECRETS = {"api_key", "header"}  # never stored
EPILOG = """
examples:
  lightserve bench serve --url http://127.0.0.1:8000 --concurrency 1 8 32 --html report.html
  lightserve bench serve --rate 2 4 8 --requests 200 --slo ttft:200 tpot:20 --json results.json
  lightserve bench serve --api chat --dataset sharegpt --dataset_path ShareGPT.json --rate 4
  lightserve bench compare before.json after.json --fail_over 5
"""


def parser() -> Parser:
    made = Parser(
        prog="lightserve bench serve",
        usage="%(prog)s [flags]",
        description="Measure any OpenAI-compatible server under load.",
        epilog=EPILOG,
    )
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    _server_flags(made.add_argument_group("server"))
    _load_flags(made.add_argument_group("load", "several rates or concurrencies: a sweep over all combinations"))
    _dataset_flags(made.add_argument_group("dataset"))
    _request_flags(made.add_argument_group("requests"))
    _output_flags(made.add_argument_group("output"))
    return made


def _server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server, with or without /v1")
    group.add_argument("--api", choices=PATHS, default="completions", help="default: completions")
    group.add_argument("--model", help="default: the first one of /v1/models")
    group.add_argument("--api_key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    group.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="a further header")


def _load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rate", type=_positive, nargs="+", help="requests per second; inf: no limit")
    group.add_argument(
        "--concurrency",
        type=_positive_int,
        nargs="+",
        help="requests at once; default: 8 without --rate, else no limit",
    )
    group.add_argument("--requests", type=_positive_int, default=100, help="in each run; default: 100")
    group.add_argument("--seconds", type=_positive, help="send no more requests after this time, in each run")
    group.add_argument(
        "--burstiness", type=_positive, default=1.0, help="1: Poisson arrivals; less: burstier; inf: even; default: 1"
    )
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals; default: 0")
    group.add_argument(
        "--warmup", type=_count, default=1, help="requests before each run that do not count; default: 1"
    )
    group.add_argument("--processes", type=_positive_int, default=1, help="processes of the client; default: 1")
    group.add_argument(
        "--slo", nargs="+", type=_slo, default=[], metavar="NAME:MS", help="ttft, tpot, e2e: for goodput"
    )


def _dataset_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset", choices=DATASETS, default="random", help="default: random")
    group.add_argument("--dataset_path", type=Path, help="file of sharegpt (JSON) or jsonl")
    group.add_argument("--input_len", type=_positive_int, default=512, help="tokens of a random prompt; default: 512")
    group.add_argument(
        "--output_len", type=_positive_int, help="tokens to generate; default: 128, sharegpt: the answer's"
    )
    group.add_argument("--range_ratio", type=_ratio, default=0.0, help="lengths vary by this share; default: 0")
    group.add_argument("--prefix_len", type=_positive_int, default=1024, help="shared tokens (prefix); default: 1024")
    group.add_argument("--num_prefixes", type=_positive_int, default=4, help="different prefixes; default: 4")
    group.add_argument("--tokenizer", help="folder or GGUF file; makes lengths exact, counts tokens without usage")


def _request_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    group.add_argument(
        "--no_ignore_eos", action="store_true", help="let random and prefix end early, without ignore_eos"
    )
    group.add_argument("--no_usage", action="store_true", help="for servers that refuse stream_options")
    group.add_argument("--extra_body", type=_json_object, default={}, metavar="JSON", help="further fields of the body")
    group.add_argument("--timeout", type=_positive, default=600.0, help="seconds until a request fails; default: 600")


def _output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="write results for `lightserve bench compare`")
    group.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots")
    group.add_argument("--label", default="", help="name of the results; default: the model")
    group.add_argument("--quiet", action="store_true", help="no progress")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The flags after validation."""

    flags: argparse.Namespace
    points: list[Point]
    slo: dict[str, float]
    headers: dict[str, str]

    @property
    def base_url(self) -> str:
        return str(self.flags.url).rstrip("/").removesuffix("/v1")

    @property
    def output_len(self) -> int:
        return self.flags.output_len or 128

    def stored(self) -> dict[str, Any]:
        """The flags that decide what is measured."""
        left_out = SECRETS | {"json", "html", "label", "quiet", "url", "slo", "rate", "concurrency"}
        return {name: _plain(value) for name, value in vars(self.flags).items() if name not in left_out}


def parse(argv: Sequence[str] | None) -> Arguments:
    made = parser()
    flags = made.parse(with_underscores(sys.argv[1:] if argv is None else argv))
    if flags.dataset in ("sharegpt", "jsonl") and flags.dataset_path is None:
        made.error(f"--dataset {flags.dataset} needs --dataset_path FILE")
    for path in (flags.json, flags.html):
        if path is not None and not path.resolve().parent.is_dir():
            made.error(f"the folder of {path} does not exist")
    headers = dict(_header(made, text) for text in flags.header)
    if flags.api_key:
        headers["Authorization"] = f"Bearer {flags.api_key}"
    return Arguments(flags, _points(flags), dict(flags.slo), headers)


def with_underscores(argv: Sequence[str]) -> list[str]:
    """--input-len is --input_len."""
    return [
        re.sub(r"(?<=\w)-", "_", arg.partition("=")[0]) + arg[len(arg.partition("=")[0]) :]
        if arg.startswith("--")
        else arg
        for arg in argv
    ]


def _points(flags: argparse.Namespace) -> list[Point]:
    rates = flags.rate or [math.inf]
    default: list[int | None] = [None if flags.rate else DEFAULT_CONCURRENCY]
    concurrencies = flags.concurrency or default
    return [Point(None if math.isinf(r) else r, c) for r in rates for c in concurrencies]


def _header(made: Parser, text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or "\n" in text or "\r" in text:
        made.error(f"--header {text!r} must be NAME:VALUE")
    return name.strip(), value.strip()


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _positive_int(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def _count(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return int(text)


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _slo(text: str) -> tuple[str, float]:
    name, colon, value = text.partition(":")
    if name not in SLO_NAMES or not colon:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME:MILLISECONDS with a name of {', '.join(SLO_NAMES)}")
    return SLO_NAMES[name], _positive(value)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value
