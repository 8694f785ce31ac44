"""The result of a simulation as a row of a table and as plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lightserve.simulate.replica import Setup
from lightserve.simulate.result import Result

# name, width, meaning
SETTINGS = (
    ("policy", -14, "order of admission"),
    ("ratio", 5, "router_token_ratio: share of the KV pool that estimated outputs may fill"),
    ("quant", 5, "quantile of recent output lengths that is the estimate"),
    ("batch", 5, "batch_max_tokens: maximum tokens of a step"),
    ("chunk", 5, "chunked_prefill_size: prompt tokens of a step that also decodes; whole: prompts are not divided"),
)
RESULTS = (
    ("tok/s", 7, "output tokens per simulated second"),
    ("req/s", 6, "requests per simulated second"),
    ("TTFT p50", 9, "time to first token from the arrival of the request, ms: the median"),
    ("TTFT p99", 8, "its 99th percentile"),
    ("ITL p50", 8, "inter-token latency, the time between two tokens of a request, ms: the median"),
    ("ITL p99", 7, "its 99th percentile"),
    ("ITL max", 7, "the longest"),
    ("KV %", 5, "largest share of the KV pool in use"),
    ("preempt", 7, "preemptions: requests that lost their KV and computed it again"),
    ("hit %", 5, "share of prompt tokens that were in the prefix cache"),
    ("sim req/s", 9, "requests per second of CPU time: the speed of the simulator, not of the policy"),
)
URGENT = "urgent TTFT"


def header() -> str:
    return " | ".join(" ".join(_padded(name, width) for name, width, _ in columns) for columns in (SETTINGS, RESULTS))


def legend() -> str:
    """What the columns mean, one line each."""
    columns = [*((name, meaning) for name, _, meaning in (*SETTINGS, *RESULTS)), (URGENT, "--urgent: median and p99")]
    return "\n".join(f"  {name:12} {meaning}" for name, meaning in columns)


def _padded(name: str, width: int) -> str:
    return name.ljust(-width) if width < 0 else name.rjust(width)


def row_of(setup: Setup, result: Result) -> str:
    limits = setup.limits
    ttft = np.array(result.ttft + result.urgent_ttft)
    p50, p99 = np.percentile(ttft, [50, 99]) * 1000
    text = (
        f"{setup.policy:14} {limits.token_ratio:5.2f} {setup.quantile:5.2f} {limits.batch_max_tokens:5} "
        f"{limits.chunk_size or 'whole':>5} | {result.output_tokens / result.seconds:7.0f} "
        f"{result.requests / result.seconds:6.1f} {p50:9.1f} {p99:8.1f} {result.itl(0.5) * 1000:8.2f} "
        f"{result.itl(0.99) * 1000:7.1f} {result.itl(1.0) * 1000:7.1f} "
        f"{100 * result.peak_used / setup.pool_size:5.1f} {result.preemptions:7} "
        f"{100 * result.hit_rate:5.1f} {result.requests / result.cpu_s:9.0f}"
    )
    if result.urgent_ttft:
        p50, p99 = np.percentile(result.urgent_ttft, [50, 99]) * 1000
        text += f"  {URGENT} {p50:.0f} {p99:.0f}"
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
