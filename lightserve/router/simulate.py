"""The real scheduler against a model of a GPU, on a virtual clock: what a policy or a limit does, in seconds.

    python -m lightserve.router.simulate --load shared --policies fifo cache_aware --batch_max_tokens 512 2048

There are no processes and no torch; a step takes as long as the cost model says. Every policy meets the same requests.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.io_struct import SamplingParams, Step, TokenOut
from lightserve.router.kv_pool import KvPool
from lightserve.router.policy import POLICIES, make_policy
from lightserve.router.req import Req
from lightserve.router.scheduler import Limits, Scheduler
from lightserve.router.token_budget import QUANTILE, OutputEstimate

EOS, OTHER = 0, 1  # what the simulated model says: prompts contain neither
VOCAB_SIZE = 32_000
URGENT = -1  # the priority of urgent requests; that of the others is 0

Lengths = npt.NDArray[np.int64]
DrawLengths = Callable[[np.random.Generator, int], Lengths]


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long a step takes. The defaults: Llama-3-8B in bfloat16 on one H200, measured 2026-11-15.

    Matmuls were measured with cuBLAS in a CUDA graph; up to 256 tokens as a decode step, from 512 as a prefill. A step
    that mixes both is one matmul over all its tokens. Attention of a prompt is what remains of a 200 ms prefill of
    8,000 tokens after 165 ms of matmuls: 32 million pairs of query and key in 35 ms.
    """

    matmul_ms: tuple[tuple[int, float], ...] = (
        (1, 4.08), (8, 4.10), (64, 4.27), (128, 4.60), (256, 6.62), (512, 11.1), (2048, 43.0), (8192, 169.0),
    )  # fmt: skip
    kv_bytes: int = 131_072  # of a token: 32 layers, K and V, 8 heads of 128, 2 bytes
    bytes_per_s: float = 4.15e12
    pairs_per_s: float = 32e6 / 35e-3
    gap_s: float = 0.0  # between steps; 0: the next is queued on the GPU before the last ends

    def matmul_s(self, tokens: int) -> float:
        """Between the measured sizes, and beyond them, a straight line."""
        table = self.matmul_ms
        at = min(max(bisect_left(table, (tokens, 0.0)), 1), len(table) - 1)
        (x0, y0), (x1, y1) = table[at - 1], table[at]
        return (y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)) / 1000

    def step_s(self, tokens: int, kv_read: int, pairs: float) -> float:
        """``kv_read``: tokens whose KV the decoding rows read; ``pairs``: of query and key in the prompts' rows."""
        if not tokens:
            return 0.0
        return (
            self.matmul_s(tokens) + kv_read * self.kv_bytes / self.bytes_per_s + pairs / self.pairs_per_s + self.gap_s
        )


class Ask(NamedTuple):
    prompt_ids: list[int]
    output_len: int  # after so many tokens the model says EOS
    priority: int


@dataclass(frozen=True, slots=True)
class Load:
    """What clients ask for, and when: ``rate`` requests a second at random, or ``streams`` that ask one by one."""

    prompt_len: DrawLengths
    output_len: DrawLengths
    count: int = 1000
    rate: float | None = None
    streams: int = 64  # without a rate
    max_new_tokens: int = 2048  # what every client asks for; outputs are shorter
    num_prefixes: int = 0  # system prompts, each as likely
    prefix_len: int = 0
    urgent: float = 0.0  # share of the requests that are urgent
    seed: int = 0

    def asks(self) -> Iterator[Ask]:
        """Made one by one: a million prompts need not be in memory. No two share more than a system prompt."""
        rng = np.random.default_rng(self.seed)
        text: list[int] = rng.integers(2, VOCAB_SIZE, 1 << 17).tolist()
        prefixes = [rng.integers(2, VOCAB_SIZE, self.prefix_len).tolist() for _ in range(self.num_prefixes)] or [[]]
        rows = zip(
            self.prompt_len(rng, self.count).tolist(),
            np.minimum(self.output_len(rng, self.count), self.max_new_tokens).tolist(),
            rng.integers(0, len(text) // 2, self.count).tolist(),
            rng.integers(0, len(prefixes), self.count).tolist(),
            (rng.random(self.count) < self.urgent).tolist(),
            strict=True,
        )
        for number, (prompt_len, output_len, at, prefix, is_urgent) in enumerate(rows):
            own = [VOCAB_SIZE + number, *text[at : at + prompt_len - 1]]
            yield Ask(prefixes[prefix] + own, output_len, URGENT if is_urgent else 0)

    def arrivals(self) -> Iterator[float]:
        """When requests come by themselves."""
        if self.rate is None:
            return itertools.repeat(0.0, min(self.streams, self.count))
        gaps = np.random.default_rng(self.seed + 1).exponential(1 / self.rate, self.count)
        times: Iterator[float] = iter(np.cumsum(gaps).tolist())
        return times


def fixed(length: int) -> DrawLengths:
    return lambda rng, count: np.full(count, length)


def lognormal(median: float, sigma: float, most: int) -> DrawLengths:
    return lambda rng, count: np.clip(rng.lognormal(np.log(median), sigma, count), 1, most).astype(np.int64)


def mixed(common: DrawLengths, rare: DrawLengths, share: float) -> DrawLengths:
    """``share`` of the lengths are drawn from ``rare``."""
    return lambda rng, count: np.where(rng.random(count) < share, rare(rng, count), common(rng, count))


CHAT_PROMPT = lognormal(90, 1.3, 4000)  # like ShareGPT: 200 tokens on average
CHAT_OUTPUT = lognormal(120, 1.0, 2000)  # 195 on average
LOADS = {
    "sharegpt": Load(CHAT_PROMPT, CHAT_OUTPUT),
    "fixed": Load(fixed(1024), fixed(256), max_new_tokens=256),
    "long": Load(mixed(CHAT_PROMPT, lognormal(12_000, 0.4, 30_000), 0.05), CHAT_OUTPUT),
    "shared": Load(CHAT_PROMPT, lognormal(60, 0.8, 500), num_prefixes=64, prefix_len=2048),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """A server: the scheduler's knobs, and the machine."""

    policy: str = "priority"
    limits: Limits = Limits(max_running=256, batch_max_tokens=2048, chunk_size=2048, token_ratio=0.85)  # noqa: RUF009
    quantile: float = QUANTILE
    pool_size: int = 900_000  # tokens: 0.9 of an H200's memory less the weights
    depth: int = 2  # steps under way at once
    cost: CostModel = CostModel()

    def scheduler(self) -> Scheduler:
        estimate = OutputEstimate(self.quantile)  # a constant of the server, a knob only here
        return Scheduler(KvPool(self.pool_size), self.limits, make_policy(self.policy), estimate)


@dataclass(slots=True)
class Result:
    seconds: float = 0.0  # simulated
    cpu_s: float = 0.0  # that the simulation took
    steps: int = 0
    requests: int = 0  # that ended
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of them, found in the cache
    peak_used: int = 0
    pauses: int = 0
    ttft: array[float] = field(default_factory=lambda: array("d"))
    urgent_ttft: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))  # between tokens of a request
    gap_counts: array[int] = field(default_factory=lambda: array("q"))  # how often: most of a step's are the same

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def itl(self, share: float) -> float:
        """So many of the gaps between tokens are no longer than this."""
        return quantile(np.array(self.gaps), np.array(self.gap_counts), share)


def quantile(values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64], share: float) -> float:
    """Of values that occur ``counts`` times; the smallest one that ``share`` of them do not exceed; 0 of none."""
    if not len(values):
        return 0.0
    order = np.argsort(values)
    reached = np.cumsum(counts[order])
    return float(values[order][np.searchsorted(reached, share * reached[-1])])


class Sequence:
    """A request as the worker knows it."""

    __slots__ = ("computed", "end", "left", "todo", "token")

    def __init__(self, req_id: int, output_len: int) -> None:
        self.token, self.end = TokenOut(req_id, OTHER), TokenOut(req_id, EOS)  # shared by all steps: they never change
        self.left = output_len  # tokens it will still say
        self.computed = 0
        self.todo = 0  # known tokens without KV


class Worker:
    """Answers steps as a model would, and says how long it took."""

    def __init__(self, cost: CostModel) -> None:
        self.seqs: dict[int, Sequence] = {}  # all that have come and not ended; they outlive a pause
        self._cost = cost

    def run(self, step: Step) -> tuple[float, list[TokenOut]]:
        for new in step.new:
            seq = self.seqs[new.req_id]
            seq.computed = len(new.cached_slots)
            seq.todo = len(new.prompt_ids) - seq.computed
        tokens = kv_read = 0
        pairs = 0.0
        outs = []
        for row in step.rows:
            seq = self.seqs[row.req_id]
            count = len(row.slots)
            tokens += count
            if count == 1:
                kv_read += seq.computed
            else:
                pairs += count * (seq.computed + count / 2)
            seq.computed += count
            if seq.todo > count:
                seq.todo -= count
                continue
            seq.todo = 1
            seq.left -= 1
            outs.append(seq.token if seq.left > 0 else seq.end)
        return self._cost.step_s(tokens, kv_read, pairs), outs


class Simulation:
    """The router's loop without processes, on a clock that steps and arrivals move."""

    def __init__(self, setup: Setup, load: Load) -> None:
        self.scheduler = setup.scheduler()
        self.result = Result()
        self._worker = Worker(setup.cost)
        self._depth = setup.depth
        self._asks = load.asks()
        self._arrivals = load.arrivals()
        self._next_s = next(self._arrivals, None)
        self._is_closed = load.rate is None  # who has an answer asks again
        self._ids = itertools.count()
        self._sampling = SamplingParams(max_new_tokens=load.max_new_tokens, seed=0)

    def run(self) -> Result:
        begin = time.thread_time()
        now = free_s = 0.0  # free_s: when the worker has done all it was given
        under_way: deque[tuple[float, list[TokenOut]]] = deque()
        while True:
            self._arrive(now)
            while len(under_way) < self._depth and (step := self.scheduler.next_step(now)):
                seconds, outs = self._worker.run(step)
                free_s = max(now, free_s) + seconds
                under_way.append((free_s, outs))
                self.result.steps += 1
                self.result.peak_used = max(self.result.peak_used, self.scheduler.pool.used)
            if under_way:
                now, outs = under_way.popleft()
                self._take(outs, now)
            elif self._next_s is not None:
                now = self._next_s
            else:
                break
        if self.scheduler.num_waiting or self.scheduler.num_running:
            raise RuntimeError("the scheduler has requests and plans nothing")
        self.result.seconds, self.result.pauses = now, self.scheduler.num_pauses
        self.result.cpu_s = time.thread_time() - begin
        return self.result

    def _arrive(self, now: float) -> None:
        while self._next_s is not None and self._next_s <= now:
            self._ask(self._next_s)
            self._next_s = next(self._arrivals, None)

    def _ask(self, now: float) -> None:
        ask = next(self._asks, None)
        if ask is None:
            return
        most = self._sampling.max_new_tokens
        req = Req(next(self._ids), ask.prompt_ids, self._sampling, most, (EOS,), now, ask.priority)
        self._worker.seqs[req.req_id] = Sequence(req.req_id, ask.output_len)
        self.scheduler.add(req)

    def _take(self, outs: list[TokenOut], now: float) -> None:
        since: dict[float, int] = {}  # when the last token was -> how many requests
        for req, _ in self.scheduler.take(outs):
            if req.first_token_s:
                since[req.last_token_s] = since.get(req.last_token_s, 0) + 1
            else:
                req.first_token_s = now
            req.last_token_s = now
            if req.finish_reason is not None:
                self._end(req, now)
        self.result.gaps.extend([now - last_s for last_s in since])
        self.result.gap_counts.extend(since.values())

    def _end(self, req: Req, now: float) -> None:
        result = self.result
        result.requests += 1
        result.output_tokens += len(req.output_ids)
        result.prompt_tokens += len(req.prompt_ids)
        result.cached_tokens += req.cached_len
        ttft = req.first_token_s - req.arrived_s
        (result.urgent_ttft if req.priority == URGENT else result.ttft).append(ttft)
        del self._worker.seqs[req.req_id]
        if self._is_closed:
            self._ask(now)


def simulate(setup: Setup, load: Load) -> Result:
    return Simulation(setup, load).run()


COLUMNS = (
    f"{'policy':12} {'ratio':>5} {'quant':>5} {'batch':>5} {'chunk':>5} | {'tok/s':>7} {'req/s':>6} {'TTFT p50':>9} "
    f"{'p99 ms':>8} {'ITL p50':>8} {'p99':>7} {'max ms':>7} {'KV %':>5} {'pauses':>6} {'hit %':>5} {'sim req/s':>9}"
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
        f"{100 * result.peak_used / setup.pool_size:5.1f} {result.pauses:6} "
        f"{100 * result.hit_rate:5.1f} {result.requests / result.cpu_s:9.0f}"
    )
    if result.urgent_ttft:
        p50, p99 = np.percentile(result.urgent_ttft, [50, 99]) * 1000
        text += f"  urgent TTFT {p50:.0f} {p99:.0f}"
    return text


def plot(folder: Path, figures: Any, runs: list[tuple[Setup, Result]]) -> None:
    """One PNG a figure of the table that is a distribution: the share of requests, or of tokens, that waited less."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("ttft", "itl"):
        figure = figures.Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        shares = np.linspace(0.005, 0.999, 200)
        for setup, result in runs:
            limits = setup.limits
            knobs = (setup.policy, limits.token_ratio, setup.quantile, limits.batch_max_tokens, limits.chunk_size)
            ttft = np.array(result.ttft + result.urgent_ttft)
            waits = np.quantile(ttft, shares) if name == "ttft" else [result.itl(share) for share in shares]
            axes.plot(np.array(waits) * 1000, shares, label=" ".join(map(str, knobs)))
        axes.set(xlabel=f"{name.upper()} ms", xscale="log", ylabel="share")
        axes.legend(title="policy, ratio, quantile, batch, chunk")
        figure.savefig(folder / f"{name}.png")


def setups(args: argparse.Namespace) -> Iterator[Setup]:
    knobs = itertools.product(args.policies, args.token_ratio, args.quantile, args.batch_max_tokens, args.chunk)
    for policy, ratio, share, batch, chunk in knobs:
        limits = Limits(args.max_running, batch, None if chunk < 0 else chunk or batch, ratio)
        yield Setup(policy, limits, share, args.pool, args.depth)


def load_of(args: argparse.Namespace) -> Load:
    load = replace(LOADS[args.load], count=args.requests, rate=args.rate, streams=args.streams, seed=args.seed)
    chosen: dict[str, Any] = {"urgent": args.urgent}
    for name in ("prompt_len", "output_len"):
        if getattr(args, name):
            chosen[name] = fixed(getattr(args, name))
    for name in ("max_new_tokens", "num_prefixes", "prefix_len"):
        if getattr(args, name) is not None:
            chosen[name] = getattr(args, name)
    return replace(load, **chosen)


def arguments() -> argparse.ArgumentParser:
    doc = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m lightserve.router.simulate", description=doc)
    add = parser.add_argument
    add("--load", choices=LOADS, default="sharegpt")
    add("--requests", type=int, default=2000)
    add("--rate", type=float, help="requests a second, at random; omitted: --streams")
    add("--streams", type=int, default=256, help="clients that ask one request after the other")
    add("--prompt_len", type=int, help="instead of the load's lengths")
    add("--output_len", type=int, help="instead of the load's lengths")
    add("--max_new_tokens", type=int, help="what clients ask for")
    add("--num_prefixes", type=int, help="distinct system prompts")
    add("--prefix_len", type=int, help="tokens of each")
    add("--urgent", type=float, default=0.0, help=f"share of requests with priority {URGENT}")
    add("--seed", type=int, default=0)
    add("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    add("--token_ratio", type=float, nargs="+", default=[0.85], help="router_token_ratio")
    add("--quantile", type=float, nargs="+", default=[QUANTILE], help="of recent outputs, taken as the guess")
    add("--batch_max_tokens", type=int, nargs="+", default=[2048])
    add(
        "--chunk", type=int, nargs="+", default=[0], help="chunked_prefill_size; 0: batch_max_tokens; -1: whole prompts"
    )
    add("--max_running", type=int, default=256, help="running_max_req_size")
    add("--pool", type=int, default=900_000, help="max_total_token_num")
    add("--depth", type=int, default=2, help="steps under way at once")
    add("--plots", type=Path, metavar="DIR", help="write ttft.png and itl.png there")
    return parser


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    figures = None
    if args.plots:
        try:
            figures = importlib.import_module("matplotlib.figure")
        except ImportError:
            parser.error("--plots needs matplotlib: pip install matplotlib")
    load = load_of(args)
    print(COLUMNS)
    runs = []
    for setup in setups(args):
        runs.append((setup, simulate(setup, load)))
        print(row_of(*runs[-1]), flush=True)
    if args.plots:
        plot(args.plots, figures, runs)


if __name__ == "__main__":
    main()
