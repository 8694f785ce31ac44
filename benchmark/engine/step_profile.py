"""Where the time of a step goes: on the GPU by kernel group and by gap, on the host by function."""

from __future__ import annotations

import cProfile
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch

GROUPS = {  # a kernel belongs to the first group whose pattern its name contains
    "attention": r"attention|attend|flash|fmha",
    "matmul": r"gemm|gemv|nvjet|cutlass|xmma|splitk|_linear|matmul|cublas",
    "rotary and KV write": r"rotary|write_kv",
    "norm": r"norm",
    "activation": r"silu|gelu",
    "sampling": r"argmax|sample|penalt|top_k|top_p|typical_p|softmax|topk|sort",
    "embedding": r"embedding",
    "copy": r"memcpy|memset",
}
OTHER = "other"
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
SHOWN_KERNELS = 14
SHOWN_GAPS = 6
SHOWN_FUNCTIONS = 18
SMALL_GAP_US = 1.0  # between neighbours in a CUDA graph
NAME_LEN = 70


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    begin_us: float
    end_us: float

    @property
    def group(self) -> str:
        return next((group for group, pattern in GROUPS.items() if re.search(pattern, self.name, re.I)), OTHER)


@dataclass(slots=True)
class GpuTime:
    """What a GPU did from its first kernel to its last. Times are microseconds."""

    span: float = 0.0
    idle: float = 0.0  # while no kernel ran
    groups: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    kernels: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)  # of kernels
    gaps: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by the kernels at both ends

    @property
    def busy_share(self) -> float:
        return 1 - self.idle / self.span if self.span else 0.0


def gpu_time(kernels: Sequence[Kernel]) -> GpuTime:
    """Sum up ``kernels``, which may overlap."""
    ordered = sorted(kernels, key=lambda kernel: kernel.begin_us)
    found = GpuTime()
    last: Kernel | None = None  # of those so far, the one that ended last
    for kernel in ordered:
        took = kernel.end_us - kernel.begin_us
        found.groups[kernel.group] += took
        found.kernels[kernel.name] += took
        found.counts[kernel.name] += 1
        if last is not None and kernel.begin_us > last.end_us:
            gap = kernel.begin_us - last.end_us
            found.idle += gap
            found.gaps[f"{_short(last.name, 30)} -> {_short(kernel.name, 30)}"] += gap
        if last is None or kernel.end_us > last.end_us:
            last = kernel
    if last is not None:
        found.span = last.end_us - ordered[0].begin_us
    return found


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """The kernels of a trace that torch.profiler has written."""
    return [
        Kernel(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in GPU_CATEGORIES
    ]


def profile_steps(run: Callable[[], float], steps: int) -> str:
    """Run ``steps`` steps unprofiled, under torch.profiler and under cProfile; ``run`` returns seconds per step."""
    run()
    plain = f"{run() * 1e6:.0f} us per step unprofiled"
    return "\n".join([plain, gpu_table(_traced(run), steps), _host_table(run, steps)])


def gpu_table(gpu: GpuTime, steps: int) -> str:
    lines = [
        f"GPU: {gpu.span / steps:.0f} us per step under the profiler, busy {gpu.busy_share:.1%}, "
        f"{sum(gpu.counts.values()) / steps:.0f} kernels"
    ]
    rows = [*_largest(gpu.groups), ("idle", gpu.idle)]
    lines += [f"  {name:24} {us / steps:9.1f} us {us / max(gpu.span, 1e-9):6.1%}" for name, us in rows]
    lines.append("  by kernel:")
    lines += [
        f"    {us / steps:9.1f} us {gpu.counts[name] / steps:6.1f} x {us / gpu.counts[name]:8.2f} us  {_short(name)}"
        for name, us in _largest(gpu.kernels)[:SHOWN_KERNELS]
    ]
    lines.append("  idle between:")
    shown = [(name, us) for name, us in _largest(gpu.gaps)[:SHOWN_GAPS] if us / steps >= SMALL_GAP_US]
    lines += [f"    {us / steps:9.1f} us  {name}" for name, us in shown]
    return "\n".join(lines)


def _traced(run: Callable[[], object]) -> GpuTime:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return gpu_time(kernels_of(json.loads(path.read_text())))


def _host_table(run: Callable[[], object], steps: int) -> str:
    profile = cProfile.Profile()
    profile.runcall(run)
    lines = ["host, under cProfile, which adds much of its own: us per step with callees, without, calls per step"]
    entries = sorted(profile.getstats(), key=lambda entry: -entry.totaltime)
    for entry in [entry for entry in entries if _is_ours(entry.code)][:SHOWN_FUNCTIONS]:
        with_callees, alone = (seconds * 1e6 / steps for seconds in (entry.totaltime, entry.inlinetime))
        lines.append(f"  {with_callees:9.1f} {alone:9.1f} {entry.callcount / steps:8.1f}  {_place(entry.code)}")
    return "\n".join(lines)


def _is_ours(code: CodeType | str) -> bool:
    """A builtin is a string."""
    return isinstance(code, CodeType) and "lightserve" in code.co_filename


def _place(code: CodeType | str) -> str:
    return code if isinstance(code, str) else f"{Path(code.co_filename).stem}.{code.co_qualname}"


def _largest(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda entry: -entry[1])


def _short(name: str, length: int = NAME_LEN) -> str:
    return name if len(name) <= length else name[: length - 3] + "..."
