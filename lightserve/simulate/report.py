"""The result of a simulation as a row of a table and as plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lightserve.simulate.simulation import Result, Setup

COLUMNS = (
    f"{'policy':12} {'ratio':>5} {'quant':>5} {'batch':>5} {'chunk':>5} | {'tok/s':>7} {'req/s':>6} {'TTFT p50':>9} "
    f"{'p99 ms':>8} {'ITL p50':>8} {'p99':>7} {'max ms':>7} {'KV %':>5} {'preempt':>7} {'hit %':>5} {'sim req/s':>9}"
)


def row_of(setup: Setup, result: Result) -> str:
    limits = setup.limits
    ttft = np.array(result.ttft + result.urgent_ttft)
    p50, p99 = np.percentile(ttft, [50, 99]) * 1000
    text = (
        f"{setup.policy:12} {limits.token_ratio:5.2f} {setup.quantile:5.2f} {limits.batch_max_tokens:5} "
        f"{limits.chunk_size or 'whole':>5} | {result.output_tokens / result.seconds:7.0f} "
        f"{result.requests / result.seconds:6.1f} {p50:9.1f} {p99:8.1f} {result.itl(0.5) * 1000:8.2f} "
        f"{result.itl(0.99) * 1000:7.1f} {result.itl(1.0) * 1000:7.1f} "
        f"{100 * result.peak_used / setup.pool_size:5.1f} {result.preemptions:7} "
        f"{100 * result.hit_rate:5.1f} {result.requests / result.cpu_s:9.0f}"
    )
    if result.urgent_ttft:
        p50, p99 = np.percentile(result.urgent_ttft, [50, 99]) * 1000
        text += f"  urgent TTFT {p50:.0f} {p99:.0f}"
    return text


def plot(folder: Path, figures: Any, runs: list[tuple[Setup, Result]]) -> None:
    """Write the distributions of TTFT and ITL as PNG files: the share of requests or tokens that waited less."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("ttft", "itl"):
        figure = figures.Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        shares = np.linspace(0.005, 0.999, 200)
        for setup, result in runs:
            limits = setup.limits
            options = (setup.policy, limits.token_ratio, setup.quantile, limits.batch_max_tokens, limits.chunk_size)
            ttft = np.array(result.ttft + result.urgent_ttft)
            waits = np.quantile(ttft, shares) if name == "ttft" else [result.itl(share) for share in shares]
            axes.plot(np.array(waits) * 1000, shares, label=" ".join(map(str, options)))
        axes.set(xlabel=f"{name.upper()} ms", xscale="log", ylabel="share")
        axes.legend(title="policy, ratio, quantile, batch, chunk")
        figure.savefig(folder / f"{name}.png")
