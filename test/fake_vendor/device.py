"""The device "fake"."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightserve.common.device import API_VERSION, Device, GraphRanges, Graphs, Profile
from lightserve.common.device.base import CopyPart, Wait
from lightserve.messages.control import StepLimits
from lightserve.utils.memory import free_ram
from test.fake_vendor.driver import MISSING, FakeDriver, allocate
from test.fake_vendor.events import VARIABLE, record
from test.fake_vendor.no_cuda import forbid_cuda
from test.fake_vendor.ops import BACKEND
from test.fake_vendor.pool import HostPools

Key = TypeVar("Key", bound=Hashable)
Out = TypeVar("Out")

COLLECTIVES = "fakeccl"
GRAPHS = GraphRanges(
    decodes=(1, 2, 4),
    tokens=(16,),
    prefill_requests=2,
    requests=(4,),
    max_launch_bound_tokens=16,
    slow_launch_requests=4,
    max_padding=8,
    max_shared_tokens=16,
)


def _connect(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    record("collectives")
    return dist.ProcessGroupGloo(store, rank, size, timeout)


dist.Backend.register_backend(COLLECTIVES, _connect, devices=["cpu"])
if VARIABLE in os.environ:  # in a server under test; the process of the tests needs torch.cuda
    forbid_cuda()


class FakeDevice(Device):
    name = "fake"
    api_version = API_VERSION
    torch_type = "cpu"
    ops_backend = BACKEND
    ops_module = "test.fake_vendor.ops"
    comm_backend = COLLECTIVES
    dtypes = (torch.float32, torch.bfloat16)
    pipeline_depth = 2
    launches_async = False
    step_timeout_s = 600.0
    driver = FakeDriver()
    memory_pools = HostPools()

    def unavailable_reason(self) -> str | None:
        return os.environ.get(MISSING)

    def torch_device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def profile(self, device: torch.device) -> Profile:
        limits = StepLimits(batch_max_tokens=512, chunked_prefill_size=32)
        return Profile("Fake 1", limits, multiprocessors=os.cpu_count() or 1, launch_lead_s=1e-3, graphs=GRAPHS)

    def set_current(self, device: torch.device) -> None:
        """There is one."""

    def graphs(self, function: Callable[[Tensor, Any], Out]) -> Graphs[Any, Out]:
        return FakeGraphs(function)

    def describe(self, device: torch.device) -> str:
        return "made of air"

    def peak_bytes(self, device: torch.device, work: Callable[[], None]) -> int:
        work()
        return 1 << 20

    def kv_budget(self, device: torch.device, mem_fraction: float) -> int:
        return int(free_ram() * mem_fraction / 16)

    def to_device(self, array: np.ndarray, device: torch.device) -> Tensor:
        return torch.from_numpy(array).clone()

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        allocate(math.prod(shape) * dtype.itemsize)
        return torch.empty(tuple(shape), dtype=dtype)

    def copy_to_host(self, *tensors: Tensor) -> FakeAsyncCopy:
        return FakeAsyncCopy(tensors)

    def copy_stream(self, device: torch.device) -> FakeCopyStream:
        return FakeCopyStream()


class FakeGraphs(Generic[Key, Out]):
    """Each captured shape has its input in a fixed place, and a replay computes what the capture has seen."""

    def __init__(self, function: Callable[[Tensor, Key], Out]) -> None:
        self._function = function
        self._inputs: dict[Key, Tensor] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._inputs

    def capture(self, examples: Iterable[tuple[Key, Tensor]]) -> None:
        for key, example in examples:
            self._function(example, key)
            self._inputs[key] = example

    def clear(self) -> None:
        self._inputs.clear()

    def replay(self, key: Key, inputs: Tensor) -> Out:
        record("replay of a graph")
        return self._function(self._inputs[key].copy_(inputs), key)


class FakeAsyncCopy:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [tensor.clone() for tensor in tensors]

    def tensors(self) -> list[Tensor]:
        record("copy to the host")
        return self._copies


class FakeCopyStream:
    """Through memory in between, as on hardware whose memory the host cannot address."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "fake-copies")

    def down(self, hosts: Sequence[Tensor], gather: CopyPart) -> Wait:
        record("copy down beside the steps")
        for i, host in enumerate(hosts):
            block = torch.empty_like(host)[None]
            gather(slice(i, i + 1), block)
            host.copy_(block[0])
        return self.finish_down

    def finish_down(self) -> None:
        """They are made at once."""

    def up(self, hosts: Sequence[Tensor], scatter: CopyPart, after: Wait | None = None) -> Future[float]:
        record("copy up beside the steps")
        return self._thread.submit(self._copy_up, hosts, scatter)

    def mark(self) -> Wait:
        return self.finish_down

    @staticmethod
    @torch.inference_mode()
    def _copy_up(hosts: Sequence[Tensor], scatter: CopyPart) -> float:
        for i, host in enumerate(hosts):
            scatter(slice(i, i + 1), host[None].clone())
        return 1e-3
