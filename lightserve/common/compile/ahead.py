"""Compile the kernels of a model in parallel, before they are launched for real."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime import driver

from lightserve.common.compile.client import running_server
from lightserve.utils.progress import Progress

MAX_THREADS = 16  # each waits for the compile server, or compiles itself


@contextmanager
def compile_ahead(enter_device: Callable[[], object]) -> Iterator[None]:
    """Within it, the launch of an uncompiled kernel starts its compilation and returns without a launch.

    At the end all kernels are compiled. Results computed within are useless but harmless: memory that a kernel would
    have written holds zeros. ``enter_device`` makes the device the current one of a thread.
    """
    jobs = _Jobs()
    before = knobs.runtime.jit_cache_hook
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS), initializer=enter_device) as jobs.threads:
        knobs.runtime.jit_cache_hook = jobs.start
        try:
            with _ZeroInsteadOfEmpty():
                yield
        finally:
            knobs.runtime.jit_cache_hook = before
        jobs.wait()


class _Jobs:
    """Compilations that were started, each once."""

    def __init__(self) -> None:
        self.threads: ThreadPoolExecutor
        self.futures: dict[tuple[str, str], Future[object]] = {}  # by kernel and specialization

    def wait(self) -> None:
        if not self.futures:
            return
        with Progress("kernels", len(self.futures), unit="items") as progress:
            for future in as_completed(self.futures.values()):
                future.result()
                progress.advance(1)

    def start(self, *, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **_: Any) -> bool:
        """Triton calls this before it compiles. True: it neither compiles nor launches."""
        if is_manual_warmup:  # from one of the threads
            return False
        key = (f"{fn.module}.{fn.name}", compile["key"])
        if key not in self.futures:
            self.futures[key] = self.threads.submit(_compile, fn, compile["specialization_data"])
        return True


def _compile(fn: Any, specialization: str) -> None:
    """Let the compile server compile it into the cache, if there is one, and load it."""
    server = running_server()
    if server is not None:
        target = driver.active.get_current_target()
        launcher = getattr(driver.active, "launcher_cls", None)
        launcher_name = None if launcher is None else f"{launcher.__module__}:{launcher.__qualname__}"
        server.compile(f"{fn.module}:{fn.name}", specialization, astuple(target), launcher_name)
    fn.jit_function.preload(specialization)


_ZEROS: dict[Any, Callable[..., Tensor]] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    Tensor.new_empty: Tensor.new_zeros,
}


class _ZeroInsteadOfEmpty(TorchFunctionMode):
    """``torch.empty`` gives zeros: an unwritten token id could be any number, and a bad index ends the process."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _ZEROS.get(func, func)(*args, **(kwargs or {}))
