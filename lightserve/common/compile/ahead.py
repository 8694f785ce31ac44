"""Triton kernels compiled side by side: one after the other, those of a model take longer than reading its weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime import driver

from lightserve.common.compile.processes import running_compiler

MAX_THREADS = 16  # each waits for a process that compiles, or does it itself


@contextmanager
def compile_ahead(enter_device: Callable[[], object]) -> Iterator[None]:
    """Within it, launching a kernel that is not compiled begins to compile it, and does not launch it.

    At the end all are compiled. What is computed within is of no use, but harmless: where a kernel should have written,
    there is zero. ``enter_device`` makes the device a thread's own.
    """
    compiling = _Compiling()
    before = knobs.runtime.jit_cache_hook
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS), initializer=enter_device) as compiling.threads:
        knobs.runtime.jit_cache_hook = compiling.begin
        try:
            with _ZeroInsteadOfEmpty():
                yield
        finally:
            knobs.runtime.jit_cache_hook = before
        for future in compiling.futures.values():
            future.result()


class _Compiling:
    def __init__(self) -> None:
        self.threads: ThreadPoolExecutor
        self.futures: dict[tuple[str, str], Future[object]] = {}  # by kernel and what it is specialised for

    def begin(self, *, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **_: Any) -> bool:
        """Triton asks before it compiles; True: not now, and no launch either."""
        if is_manual_warmup:  # from one of the threads
            return False
        key = (f"{fn.module}.{fn.name}", compile["key"])
        if key not in self.futures:
            self.futures[key] = self.threads.submit(_compile, fn, compile["specialization_data"])
        return True


def _compile(fn: Any, specialization: str) -> None:
    """By another process if there is one; then it is found in the cache."""
    compiler = running_compiler()
    if compiler is not None:
        target = driver.active.get_current_target()
        launcher = getattr(driver.active, "launcher_cls", None)
        launcher_name = None if launcher is None else f"{launcher.__module__}:{launcher.__qualname__}"
        compiler.compile(f"{fn.module}:{fn.name}", specialization, astuple(target), launcher_name)
    fn.jit_function.preload(specialization)


_ZEROS: dict[Any, Callable[..., Tensor]] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    Tensor.new_empty: Tensor.new_zeros,
}


class _ZeroInsteadOfEmpty(TorchFunctionMode):
    """A token id that nobody wrote could be any number, and an index beyond a tensor ends the process."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _ZEROS.get(func, func)(*args, **(kwargs or {}))
