"""The memory bandwidth and matmul rate of a device, and the time of a call on it, for the other benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from lightserve.common.device import device_of

Call = Callable[[], object]

REPEATS = 15
MIN_REPLAY_S = 2e-3  # of one measurement: an event is good to half a microsecond, a replay costs ten to start


@dataclass(frozen=True, slots=True)
class Ceilings:
    bytes_per_s: float  # read plus written by a large copy
    flops_per_s: float  # of a large matmul

    def floor_s(self, num_bytes: float, flops: float) -> float:
        """The least time for both: the shorter one hides behind the longer one."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)

    def __str__(self) -> str:
        return f"copy {self.bytes_per_s / 1e12:.2f} TB/s, matmul {self.flops_per_s / 1e12:.0f} TFLOP/s"


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measured with a copy of 1 GiB and a matmul of 8192 x 8192 x 8192; with a hundredth of that on a CPU."""
    is_gpu = device.type != "cpu"
    count, side = (2**29, 8192) if is_gpu else (2**22, 512)
    source = torch.zeros(count, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    # copy_ would take the slower copy engine
    copy_s = seconds_per_call([lambda: torch.neg(source, out=target)], device)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    matmul_s = seconds_per_call([lambda: a @ b], device)
    return Ceilings(2 * source.nbytes / copy_s, 2 * side**3 / matmul_s)


def seconds_per_call(calls: Sequence[Call], device: torch.device, repeats: int = REPEATS) -> float:
    """The median time of one of ``calls``, which run one after the other.

    They should compute the same with different tensors, which together exceed the cache. On a GPU they are replayed as
    one CUDA graph, so the launch time of Python is not counted.
    """
    platform = device_of(device)
    run = platform.as_one_launch(lambda: _run_all(calls))
    run()
    rounds = max(1, round(MIN_REPLAY_S / max(platform.seconds_of(run), 1e-6)))
    return median(platform.seconds_of(lambda: _run_all([run] * rounds)) for _ in range(repeats)) / rounds / len(calls)


def eager_seconds_per_call(calls: Sequence[Call], device: torch.device, repeats: int = REPEATS) -> float:
    """As ``seconds_per_call``, with the launches of Python."""
    platform = device_of(device)
    _run_all(calls)
    return median(platform.seconds_of(lambda: _run_all(calls)) for _ in range(repeats)) / len(calls)


def _run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
