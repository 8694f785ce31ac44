"""``lightserve bench NAME``: the benchmarks that people need often. Each is a module with ``main(argv)``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from lightserve.errors import InvalidRequestError, LightserveError
from lightserve.utils.spelling import nearest


class Benchmark(NamedTuple):
    help: str
    module: str
    parser: str | None = None  # "module:function" that makes its parser without torch, for completion


SERVE_PARSER = "lightserve.bench.client.arguments:parser"
COMPARE_PARSER = "lightserve.bench.compare:parser"
BENCHMARKS = {
    "serve": Benchmark("latency and throughput of a running server", "lightserve.bench.serve", SERVE_PARSER),
    "compare": Benchmark("results of `bench serve`, side by side", "lightserve.bench.compare", COMPARE_PARSER),
    "offline": Benchmark("prefill and decode of a model in this process", "lightserve.bench.offline"),
    "kernels": Benchmark("each kernel beside torch and the limits of the GPU", "lightserve.bench.kernels"),
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text())
        return 0
    name, *rest = argv
    if name not in BENCHMARKS:
        near = nearest(name, BENCHMARKS)
        hint = f"did you mean {near}?" if near else f"known: {', '.join(BENCHMARKS)}"
        raise InvalidRequestError(f"unknown benchmark {name!r}; {hint}")
    sys.argv[0] = f"lightserve bench {name}"  # what argparse calls the program
    return _import(name).main(rest) or 0


def _import(name: str) -> ModuleType:
    try:
        return import_module(BENCHMARKS[name].module)
    except ModuleNotFoundError as error:
        remedy = "install it with pip, or lightserve with the extra [bench]"
        raise LightserveError(f"bench {name} needs the package {error.name}, which is missing; {remedy}") from error


def help_text() -> str:
    lines = [f"  {name:8} {benchmark.help}" for name, benchmark in BENCHMARKS.items()]
    return "\n".join(["usage: lightserve bench NAME [flags]", "", *lines, "", "`bench NAME --help` lists its flags."])
