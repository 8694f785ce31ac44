"""A step whose calls of the C library are recorded, and then made with a few calls from Python.

A decode step of a small model is some hundred calls of the library that take microseconds each. Between them Python
checks tensors, takes memory for results and converts arguments, which is a quarter of the step or more. A recorded step
does none of this: its tensors stay where they were, and of torch's operators only those that compute are called again.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightserve.common import ops
from lightserve.common.cpu_kernel._library import BACKEND, KERNELS, has_kernel, library

Key = TypeVar("Key", bound=Hashable)
Out = TypeVar("Out")

MAX_BYTES = 2**27  # that recordings keep, of one function: the results of all layers
WORD = 2**64 - 1
MAKES_MEMORY = {torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided}
# numpy, tolist and item read values, which differ in the next step
READS_VALUES = {torch.ops.aten.resolve_conj, torch.ops.aten.resolve_neg, torch.ops.aten._local_scalar_dense}
DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}


class RecordedSteps(Generic[Key]):
    """Calls a function of a tensor of integers and a key, and records it when a key comes for the second time.

    It must do the same whatever the integers are. If it does not, as far as operators tell, it is never recorded. A
    result is valid until the next call with that key.
    """

    def __init__(self) -> None:
        self._is_fit = library is not None
        self._seen: set[Key] = set()
        self._too_large: set[Key] = set()
        self._recordings: dict[Key, Recording[Any]] = {}  # those that were replayed last come last

    def __call__(self, function: Callable[[Tensor, Key], Out], inputs: Tensor, key: Key) -> Out:
        recording: Recording[Out] | None = self._recordings.pop(key, None)
        if recording is not None:
            self._recordings[key] = recording
            return recording.replay(inputs)
        if not self._is_fit or key not in self._seen or key in self._too_large:
            self._seen.add(key)
            return function(inputs, key)
        return self._record(function, inputs, key)

    def _record(self, function: Callable[[Tensor, Key], Out], inputs: Tensor, key: Key) -> Out:
        recorder, inputs = Recorder(), inputs.clone()
        with recorder, recorder.watch_library():
            out = function(inputs, key)
        recording = Recording(recorder, inputs, out)
        self._is_fit = recorder.is_fit
        if recording.num_bytes > MAX_BYTES:
            self._too_large.add(key)
        elif recorder.is_fit:
            self._make_room(recording.num_bytes)
            self._recordings[key] = recording
        return out

    def _make_room(self, num_bytes: int) -> None:
        while sum(each.num_bytes for each in self._recordings.values()) + num_bytes > MAX_BYTES:
            del self._recordings[next(iter(self._recordings))]

    def clear(self) -> None:
        """Forget the recordings: memory that they contain the addresses of is given back."""
        self._recordings.clear()


class Recording(Generic[Out]):
    def __init__(self, recorder: Recorder, inputs: Tensor, out: Out) -> None:
        self._actions = recorder.finish()
        self._tensors = recorder.tensors  # keeps the memory whose addresses the calls have
        self._inputs, self._out = inputs, out
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in recorder.made}
        self.num_bytes = sum(storage.nbytes() for storage in storages.values())

    def replay(self, inputs: Tensor) -> Out:
        self._inputs.copy_(inputs)
        for act in self._actions:
            act()
        return self._out


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees torch's operators, and the calls of the library by its own thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_fit = True
        self.tensors: list[object] = []
        self.made: list[Tensor] = []  # by operators
        self._actions: list[Callable[[], object]] = []
        self._words: list[int] = []  # of calls of the library after the last action
        self._thread = threading.get_ident()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._add(func, args, kwargs or {}, out)
        return out

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        results = list(_tensors([out]))
        is_more_than_tensors = not results or len(results) != (len(out) if isinstance(out, tuple | list) else 1)
        if is_more_than_tensors or _depends_on_values(func, args):
            self.is_fit = False
            return
        self.tensors += results
        if func._schema.is_mutable:
            self._act(partial(func, *args, **kwargs))
            return
        given = {_address(tensor) for tensor in _tensors((*args, *kwargs.values()))}
        if all(_address(result) in given for result in results):
            return  # views: they see what becomes of the memory
        self.made += results
        if func.overloadpacket not in MAKES_MEMORY:
            self._act(partial(_repeat, func, args, kwargs, results))

    def _act(self, action: Callable[[], object]) -> None:
        self._end_calls()
        self._actions.append(action)

    def _end_calls(self) -> None:
        if self._words:
            assert library is not None
            words = (ctypes.c_uint64 * len(self._words))(*self._words)
            self._actions.append(partial(library.ls_repeat, words, len(words)))
            self._words = []

    def finish(self) -> list[Callable[[], object]]:
        self._end_calls()
        return self._actions

    @contextmanager
    def watch_library(self) -> Iterator[None]:
        functions = {name: getattr(library, name) for name in KERNELS if has_kernel(name)}
        for name, function in functions.items():
            setattr(library, name, partial(self._call, name, function))
        try:
            yield
        finally:
            for name, function in functions.items():
                setattr(library, name, function)

    def _call(self, name: str, function: Callable[..., None], *args: Any) -> None:
        function(*args)
        if threading.get_ident() == self._thread:
            assert library is not None
            self.tensors += [arg for arg in args if isinstance(arg, ctypes.Structure)]
            words = [_word(kind, arg) for kind, arg in zip(KERNELS[name], args, strict=True)]
            self._words += [library.ls_call_of(name.encode()), len(words), *words]


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    if func.overloadpacket in READS_VALUES or not DEPENDS_ON_VALUES.isdisjoint(func.tags):
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return str(func.namespace) != "aten"  # collectives, and what nobody has looked at
    # rows by number have a shape that is known, rows by mask have not
    return func.overloadpacket is not torch.ops.aten.index or any(
        tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1:])
    )


def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> None:
    again = func(*args, **kwargs)
    for result, new in zip(results, _tensors([again]), strict=True):
        result.copy_(new)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _word(kind: Any, value: Any) -> int:
    """An argument of the library in 64 bits, as ``api.cpp`` reads them."""
    if value is None:
        return 0
    if isinstance(value, ctypes.Structure):
        return ctypes.addressof(value)
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value) & WORD


if library is not None:
    ops.register_repeater(BACKEND, RecordedSteps)
