"""What a device must offer. A subclass describes one kind of device; it holds no state of a worker."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from lightserve.common import ops
from lightserve.common.device.blocking_copies import BlockingAsyncCopy, BlockingCopyStream
from lightserve.common.device.ops_backends import load_ops, load_ops_backends
from lightserve.common.device.profile import Profile
from lightserve.common.ops import DeviceTraits
from lightserve.errors import ServerError

Key = TypeVar("Key", contravariant=True)
Out = TypeVar("Out")
Result = TypeVar("Result", covariant=True)

API_VERSION = 1  # of this class; it grows when a device of another package would have to change


class AsyncCopy(Protocol):
    """Copies of tensors that are on their way to the host."""

    def tensors(self) -> list[Tensor]:
        """Wait for the copies, and return them."""


class Event(Protocol):
    def synchronize(self) -> None:
        """Wait until all has happened that was launched before this event."""


class Stream(Protocol):
    """Launches in an order of their own."""

    def record_event(self) -> Event: ...

    def wait_event(self, event: Any) -> None:
        """What is launched next waits for an event of another stream."""

    def synchronize(self) -> None: ...


class Streams(Protocol):
    """Those of a kind of device."""

    def new(self, device: torch.device) -> Stream: ...

    def current(self, device: torch.device) -> Stream:
        """On which this thread launches."""

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Within it this thread launches on ``stream``."""


class Communicator(Protocol):
    """One rank of a group that includes a trainer."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Wait for a tensor of ``root``, and write it into this one."""

    def close(self) -> None: ...


Wait = Callable[[], None]  # returns when something has happened
CopyPart = Callable[[slice, Tensor], None]  # which of the tensors in host memory, and so many on the device


class CopyStream(Protocol):
    """Copies between device and host memory, beside the steps. Copies down and up happen in the order of the calls."""

    def down(self, hosts: Sequence[Tensor], gather: CopyPart) -> Wait:
        """Copy what ``gather`` writes for some of ``hosts``, which are of one shape, into one tensor on the device.

        It reads before the next step writes. The content of ``hosts`` is there for ``up``, and for the host itself
        after ``finish_down``, or when the function that is returned has returned.
        """

    def finish_down(self) -> None:
        """Wait until the content of all copies down so far is in host memory. From any thread."""

    def up(self, hosts: Sequence[Tensor], scatter: CopyPart, after: Wait | None = None) -> Future[float]:
        """Call ``scatter`` with copies of some of ``hosts`` on the device until it has had all, after the steps so far.

        ``after``: only after the steps before that mark. The result is the time in seconds that it took, when it is
        done.
        """

    def mark(self) -> Wait:
        """A function that waits for the steps that were launched so far."""


class MappedMemory(Protocol):
    """Memory of a device that can be given back while its addresses stay, so that captured launches stay valid."""

    def tensor(self) -> Tensor:
        """All of it, as bytes."""

    def release(self) -> None:
        """Give it back, after what was launched. Nothing may use it until ``restore``."""

    def restore(self) -> None:
        """Take as much again. What was in it is lost. Raises ``torch.OutOfMemoryError`` if others have it."""


class MemoryMapper(Protocol):
    """Of a kind of device."""

    def can_map(self, device: torch.device) -> bool:
        """Whether ``device`` and its driver know how."""

    def take(self, num_bytes: int, device: torch.device) -> MappedMemory: ...


class MappedPool(Protocol):
    """Memory of a device for many tensors, whose content can be moved to the host while its addresses stay."""

    def use(self) -> AbstractContextManager[object]:
        """What this thread allocates within it is in this memory."""

    def settle(self) -> None:
        """Nothing more will be allocated in it: give back what is not used."""

    def release(self) -> None:
        """Copy everything to the host, after what was launched, and give the memory back.

        Raises if the host has no room: then nothing has changed. Nothing may use the memory until ``restore``.
        """

    def restore(self) -> None:
        """Take the memory again, with its content. Raises ``torch.OutOfMemoryError`` if others have it."""


class MemoryPools(Protocol):
    """Of a kind of device."""

    def open(self, device: torch.device) -> MappedPool | None:
        """None: ``device`` or its machine cannot do it."""


class Driver(Protocol):
    """What the driver of a kind of device says, in its own words."""

    def problem(self, device: torch.device) -> str | None:
        """Why ``device`` cannot serve now, with a remedy: a driver that is too old, memory that others hold.

        None if it can. Called before anything loads, perhaps more than once.
        """

    def out_of_memory(self, error: RuntimeError) -> str | None:
        """Which memory did not suffice, if ``error`` says so; None: it is another error.

        ``torch.OutOfMemoryError`` is known anyway.
        """


class Graphs(Protocol[Key, Result]):
    """A function ``f(inputs, key)`` whose launches are captured once for each key and replayed later."""

    def __contains__(self, key: Key) -> bool: ...

    def capture(self, examples: Iterable[tuple[Key, Tensor]]) -> None: ...

    def clear(self) -> None:
        """Forget what was captured."""

    def replay(self, key: Key, inputs: Tensor) -> Result: ...


class Device(ABC):
    api_version: ClassVar[int | None] = None  # the ``API_VERSION`` that a device of another package was written for
    name: ClassVar[str]  # of the option --device
    torch_type: ClassVar[str]  # ``torch.device.type`` of its tensors
    ops_backend: ClassVar[str]  # of common.ops
    ops_module: ClassVar[str]  # importing it registers the backend
    comm_backend: ClassVar[str]  # of torch.distributed
    dtypes: ClassVar[tuple[torch.dtype, ...]]  # supported; a model of another dtype is computed in the first
    pipeline_depth: ClassVar[int]  # steps in flight; 2 if the device should find its next step queued
    launches_async: ClassVar[bool]  # whether a launch returns before the work is done
    step_timeout_s: ClassVar[float] = 60.0  # default of --step_timeout: a step that takes longer has hung
    max_head_dim: ClassVar[int | None] = None  # of the attention ops; None: any
    streams: ClassVar[Streams | None] = None  # for copies; None: it launches in one order
    memory_mapper: ClassVar[MemoryMapper | None] = None  # for memory whose addresses stay; None: there is none
    memory_pools: ClassVar[MemoryPools | None] = None  # for weights that move to the host; None: the worker is stopped
    driver: ClassVar[Driver | None] = None  # which says what is wrong with it; None: torch says it
    caution: ClassVar[str] = ""  # what an operator should know before trusting it; shown in the banner
    # lengths that use every code path. Triton compiles a kernel for 1, one for multiples of 16, one for other lengths
    warm_up_prompts: ClassVar[tuple[int, ...]] = (16, 7, 100, 1)
    num_parts: int = 1  # of this server, which share the host's memory: engines and pipeline stages
    # returns when the other processes of this server have taken their memory on the device; before ``kv_budget``
    wait_for_others: Callable[[], None] = staticmethod(lambda: None)

    # which devices there are

    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """Why this machine has no such device, with a remedy; None if it has one."""

    @abstractmethod
    def torch_device(self, index: int) -> torch.device:
        """The device with this number of this machine."""

    @abstractmethod
    def profile(self, device: torch.device) -> Profile:
        """The size of ``device``, and the numbers that were tuned for it."""

    def traits(self, device: torch.device) -> DeviceTraits:
        """What kernels may use on ``device``; by default nothing that some devices lack."""
        return DeviceTraits()

    @abstractmethod
    def set_current(self, device: torch.device) -> None:
        """Make ``device`` the current one of this thread."""

    # operators

    def bind(self, device: torch.device, deterministic: bool = False, ops_backends: Sequence[str] = ()) -> None:
        """Make ``device`` the one of this process and bind the ops to its backend.

        ``deterministic``: the result of a row does not depend on the rows beside it. That is slower. ``ops_backends``:
        those of other packages, which are preferred to the device's.
        """
        global _bound
        check_driver(self, device)
        load_ops(f"device {self.name}", partial(import_module, self.ops_module))
        if not ops.has_backend(self.ops_backend):
            raise ServerError(f"device {self.name}: {self.ops_module} implements no op for {self.ops_backend!r}")
        load_ops_backends(ops_backends)
        ops.use_backend(*ops_backends, *self._backends(deterministic))
        ops.use_traits(self.traits(device))
        self.set_current(device)
        _bound = self

    def keeps_gguf_packed(self, num_ranks: int) -> bool:
        """Default of --quantization for GGUF files: whether products with packed weights are faster than expanded."""
        return False

    def _backends(self, deterministic: bool) -> list[str]:
        """Those of ``ops_module``, the preferred one first."""
        if deterministic:
            return [ops.batch_invariant(self.ops_backend), self.ops_backend]
        return [self.ops_backend]

    def dtype_for(self, model_dtype: str | None) -> torch.dtype:
        """The dtype to compute a model in unless the operator sets one."""
        dtypes = [dtype for dtype in self.dtypes if self.has_dtype(dtype)]
        return next((dtype for dtype in dtypes if str(dtype) == f"torch.{model_dtype}"), dtypes[0])

    def has_dtype(self, dtype: torch.dtype) -> bool:
        return True

    def check_kv_dtype(self, kv_dtype: str | None, device: torch.device) -> None:
        """Refuse a --kv_dtype that ``device`` cannot convert. Called before weights load; None: KV is not quantised."""
        if kv_dtype == "fp8" and not self.traits(device).has_dot(torch.float8_e4m3fn):
            raise ServerError(
                f"kv_dtype fp8 needs float8_e4m3fn, which this {self.name} device does not have; use int8"
            )

    def compile_kernels(self, device: torch.device, work: Callable[[], None]) -> None:  # noqa: B027  most compile none
        """Compile in parallel the kernels that ``work`` launches. ``work`` is not called if nothing compiles."""

    # graphs

    def graphs(self, function: Callable[[Tensor, Any], Out]) -> Graphs[Any, Out] | None:
        """Captured launches of ``function``; None: the device has no graphs."""
        return None

    def as_one_launch(self, work: Callable[[], object]) -> Callable[[], object]:
        """What computes the same as ``work``, which always launches the same, with one launch if there are graphs."""
        return work

    # what people measure and look up

    def seconds_of(self, work: Callable[[], object]) -> float:
        """How long the current device computes what ``work`` launches."""
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    def trace_activities(self) -> list[ProfilerActivity]:
        """What torch's profiler records."""
        return [ProfilerActivity.CPU]

    def describe(self, device: torch.device) -> str:
        """What people may want to know of ``device`` beside its name; "" if nothing."""
        return ""

    # other ranks

    def reads_peer(self, device: torch.device, peer: int) -> bool:
        """Whether ``device`` can read the memory of the one with the number ``peer`` of this machine."""
        return False

    def join_communicator(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> Communicator:
        """Join a trainer's communicator of the kind ``comm_backend``. Returns when all ranks are there."""
        raise ServerError(f"the device {self.name} joins no communicator by its unique id; use the backend gloo")

    # memory

    def free_cached_memory(self) -> None:  # noqa: B027  most devices cache none
        """Give memory back that nothing uses: a model was closed."""

    def peak_bytes(self, device: torch.device, work: Callable[[], None]) -> int:
        """Memory that ``work`` needs beside what is allocated now; 0 if the KV budget leaves room for it anyway."""
        return 0

    @abstractmethod
    def kv_budget(self, device: torch.device, mem_fraction: float) -> int:
        """Bytes for the KV pool once the weights are loaded."""

    # copies between host and device, by default those that torch has for every device: the host waits for them

    def to_device(self, array: np.ndarray, device: torch.device) -> Tensor:
        """A copy of ``array`` on ``device``. Better if the host does not wait for the copy."""
        return torch.from_numpy(array).to(device)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that the device reads without making the host wait, if there is such."""
        return torch.empty(tuple(shape), dtype=dtype)

    def copy_to_host(self, *tensors: Tensor) -> AsyncCopy:
        """Start to copy ``tensors``, which are of this device."""
        return BlockingAsyncCopy(tensors)

    def copy_stream(self, device: torch.device) -> CopyStream:
        """Copies that delay steps as little as possible."""
        return BlockingCopyStream(device, self.set_current)


def in_host_memory(platform: Device, array: np.ndarray) -> Tensor:
    """A copy of ``array`` in host memory that the device reads without making the host wait."""
    memory = platform.host_memory(array.shape, torch.from_numpy(array).dtype)
    memory.numpy()[...] = array
    return memory


def shown_name(platform: Device) -> str:
    """With what an operator should know before trusting it."""
    return f"{platform.name} ({platform.caution})" if platform.caution else platform.name


def check_driver(platform: Device, device: torch.device) -> None:
    """Refuse a device whose driver says that it cannot serve. Called before anything loads."""
    problem = None if platform.driver is None else platform.driver.problem(device)
    if problem is not None:
        raise ServerError(f"device {platform.name}, {device}: {problem}")


def check_head_dim(platform: Device, head_dim: int) -> None:
    """Refuse a model whose attention heads the ops cannot compute. Called before weights load."""
    if platform.max_head_dim is not None and head_dim > platform.max_head_dim:
        raise ServerError(
            f"the model's head_dim is {head_dim}; attention on {platform.name} takes up to {platform.max_head_dim}; "
            "use the device cpu"
        )


_bound: Device | None = None


def bound_device() -> Device | None:
    """The device that this process computes on; None before it is bound."""
    return _bound
