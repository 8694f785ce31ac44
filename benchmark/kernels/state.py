"""How close ops with recurrent state come to the limits of the device, at the sizes of models.

    python -m benchmark.kernels.state [--only decode]

The bytes are those of inputs, results and states, each once. The operations of a scan are its least: a token decays,
corrects, adds to and reads each element of the state. On a CPU (--device cpu) the sizes are tiny, to try the program.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from lightserve.bench.ceilings import measure_ceilings
from lightserve.bench.kernel_cases import Case, InputFactory
from lightserve.bench.kernels import row_of
from lightserve.common import ops
from lightserve.common.device import pick_device

CONV_WIDTH = 4
STATE_ITEM = 4  # float32


class Scan(NamedTuple):
    name: str
    k_heads: int
    heads: int
    k_dim: int
    v_dim: int
    decays_by_channel: bool = False

    @property
    def state_size(self) -> int:
        return self.heads * self.k_dim * self.v_dim

    @property
    def is_mamba(self) -> bool:
        return self.name == "mamba_scan"

    @property
    def channels(self) -> int:
        """Of the convolution before it."""
        return 2 * self.k_heads * self.k_dim + self.heads * self.v_dim

    def token_bytes(self, item: int) -> int:
        """Of inputs and the result of a token."""
        decays = self.heads * (self.k_dim if self.decays_by_channel else 1)
        return (self.channels + self.heads * self.v_dim) * item + (decays + self.heads) * 4


class Loads(NamedTuple):
    scans: tuple[Scan, ...]
    requests: tuple[int, ...]  # of a decode step
    prompts: tuple[tuple[str, list[int]], ...]  # tokens of each request


MODELS = Loads(
    scans=(
        Scan("gated_delta_rule", 16, 48, 128, 128),  # Qwen3.6-27B
        Scan("gated_delta_rule by channel", 32, 32, 128, 128, decays_by_channel=True),  # Kimi-Linear-48B
        Scan("mamba_scan", 8, 128, 128, 64),  # Nemotron-H
    ),
    requests=(1, 8, 64, 256),
    prompts=(
        ("128", [128]),
        ("2048", [2048]),
        ("8192", [8192]),
        ("8 x 1024", [1024] * 8),
        ("448 and 64 x 1", [448, *[1] * 64]),
    ),
)
TINY = Loads(
    scans=(
        Scan("gated_delta_rule", 1, 2, 16, 16),
        Scan("gated_delta_rule by channel", 2, 2, 16, 16, decays_by_channel=True),
        Scan("mamba_scan", 1, 2, 16, 16),
    ),
    requests=(1, 3),
    prompts=(("9 and 1", [9, 1]),),
)


def cases_of(loads: Loads, item: int) -> Iterator[Case]:
    steps = [(f"decode {requests}", [1] * requests) for requests in loads.requests]
    steps += [(f"prompt {load}", lens) for load, lens in loads.prompts]
    for scan in loads.scans:
        for load, lens in steps:
            yield _conv_case(scan, load, lens, item)
            yield _scan_case(scan, load, lens, item)


def _conv_case(scan: Scan, load: str, lens: list[int], item: int) -> Case:
    rows = 2 * sum(lens) + 2 * (CONV_WIDTH - 1) * len(lens)
    inputs = partial(_conv_inputs, scan.channels, lens)
    return Case("causal_conv1d", load, inputs, ops.causal_conv1d, None, rows * scan.channels * item)


def _scan_case(scan: Scan, load: str, lens: list[int], item: int) -> Case:
    num_bytes = 2 * len(lens) * scan.state_size * STATE_ITEM + sum(lens) * scan.token_bytes(item)
    flops = (5.0 if scan.is_mamba else 7.0) * scan.state_size * sum(lens)
    op: Any = ops.mamba_scan if scan.is_mamba else ops.gated_delta_rule
    return Case(scan.name, load, partial(_scan_inputs, scan, lens), op, None, num_bytes, flops)


def _batch(lens: list[int], factory: InputFactory) -> ops.StateBatch:
    rows = factory.ints(range(len(lens)))
    starts = factory.ints([sum(lens[:i]) for i in range(len(lens) + 1)])
    return ops.StateBatch(starts, rows, rows, max_tokens=max(lens))


def _conv_inputs(channels: int, lens: list[int], factory: InputFactory) -> tuple[Any, ...]:
    states = factory.randn(len(lens), CONV_WIDTH - 1, channels)
    params = ops.ConvParams(factory.randn(channels, CONV_WIDTH))
    return factory.randn(sum(lens), channels), params, states, _batch(lens, factory)


def _scan_inputs(scan: Scan, lens: list[int], factory: InputFactory) -> tuple[Any, ...]:
    tokens = sum(lens)
    q, k = (factory.randn(tokens, scan.k_heads, scan.k_dim) for _ in range(2))
    v = factory.randn(tokens, scan.heads, scan.v_dim)
    states = factory.randn(len(lens), scan.heads, scan.v_dim, scan.k_dim, dtype=torch.float32)
    batch = _batch(lens, factory)
    if scan.is_mamba:
        a, dt_bias, d = (-factory.randn(scan.heads, dtype=torch.float32).abs() for _ in range(3))
        return (
            ops.MambaInputs(v, factory.randn(tokens, scan.heads), k, q),
            ops.MambaParams(a, dt_bias, d),
            states,
            batch,
        )
    decays = (tokens, scan.heads, scan.k_dim) if scan.decays_by_channel else (tokens, scan.heads)
    log_decay = -factory.randn(*decays, dtype=torch.float32).abs()
    beta = factory.randn(tokens, scan.heads, dtype=torch.float32).sigmoid()
    return ops.DeltaInputs(q, k, v, log_decay, beta), states, batch


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda; omitted: the best one here")
    parser.add_argument("--only", default="", help="cases whose name or load contains this")
    args = parser.parse_args(argv)
    kind = pick_device(args.device)
    device, dtype = kind.torch_device(0), kind.dtypes[0]
    kind.bind(device)
    ceilings = measure_ceilings(device, dtype)
    print(f"{str(dtype).removeprefix('torch.')} on {kind.name}; {ceilings}")
    print(f"{'case':20} {'load':>16} {'us':>10} {'reached':>16} {'of most':>7}")
    for case in cases_of(TINY if kind.name == "cpu" else MODELS, dtype.itemsize):
        if args.only in f"{case.op} {case.load}":
            print(row_of(case, InputFactory(device, dtype), ceilings), flush=True)


if __name__ == "__main__":
    main()
