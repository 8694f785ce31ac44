"""Compile for an H200, without a GPU, all that the wrappers would launch; prints what came of it as JSON.

The wrappers run on CPU tensors with Triton told that an sm_90 is there, and each launch stops after the compiler: so a
kernel is compiled with the very types, constants and alignments its wrapper passes. Runs as a process of its own,
because Triton decides on import whether it interprets.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lightserve.common import ops
from lightserve.common.compile.server import AbsentGpu
from lightserve.common.triton_kernel import linear, norm_linear
from test.ops.cases import ARGS, FLOATS, attention_args, context_attention_args, share_prefixes

BACKENDS = ("triton", ops.fixed_order("triton"))
HEAD_DIMS = (80, 128, 256)  # padded, the usual, and the largest; ARGS holds 64


class AbsentH200(AbsentGpu):
    def __init__(self) -> None:
        super().__init__(GPUTarget("cuda", 90, 32))

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Stands in for ``JITFunction.run``; notes of each kernel in each dtype the shared memory, or what went wrong."""

    def __init__(self) -> None:
        self.dtype = ""
        self.shared_bytes: dict[str, dict[str, int]] = {}
        self.errors: dict[str, str] = {}
        self._run = JITFunction.run

    def install(self) -> None:
        driver.set_active(AbsentH200())
        JITFunction.run = lambda *args, **kwargs: self.compile(*args, **kwargs)

    def compile(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = kernel.fn.__name__
        try:
            compiled = self._run(kernel, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:  # whatever the compiler raises is this kernel's result; the others go on
            self.errors[name] = f"{self.dtype}: {error!r}"
            return
        by_dtype = self.shared_bytes.setdefault(name, {})
        by_dtype[self.dtype] = max(by_dtype.get(self.dtype, 0), compiled.metadata.shared)


def call_every_wrapper(dtype: torch.dtype) -> None:
    for backend in BACKENDS:
        for name, op in ops.OPS.items():
            if backend in op.impls:
                op.impls[backend](*ARGS[name](16, dtype, "cpu"))
        for dim in HEAD_DIMS:
            shape = ([(700, 1), (800, 1)], (8, 2), dim, dtype, "cpu")
            ops.context_attention.impls[backend](*context_attention_args(*shape), torch.ones(8))
            ops.token_attention.impls[backend](*attention_args(*shape), torch.ones(8))
    q, cache, batch, scale = attention_args([(700, 1), (800, 1)], (8, 2), HEAD_DIMS[-1], dtype, "cpu")
    ops.token_attention.impls["triton"](q, cache, share_prefixes(cache, batch, [(0, 2, 600)]), scale)
    ops.choose.impls["triton"](*ARGS["choose"](16, dtype, "cpu")[:4])  # without masks
    for config in (linear.NARROW, linear.WIDE):
        for rows in (8, 32):
            linear.multiply(torch.ones(rows, 2048, dtype=dtype), torch.ones(128, 2048, dtype=dtype), None, config)
    compile_norm_linear(dtype)


def compile_norm_linear(dtype: torch.dtype) -> None:
    """In every dtype, though the wrapper takes it in few."""
    norm_weight, weight = torch.ones(2048, dtype=dtype), torch.ones(128, 2048, dtype=dtype)
    for rows, config, is_gated in ((1, norm_linear.NARROW, True), (2, norm_linear.NARROW, False)):
        x = torch.ones(rows, 2048, dtype=dtype)
        norm_linear.multiply(x, x, norm_weight, 1e-5, weight, None, config=config, is_gated=is_gated)


if __name__ == "__main__":
    compiler = Compiler()
    compiler.install()
    for dtype in FLOATS:
        compiler.dtype = str(dtype).removeprefix("torch.")
        call_every_wrapper(dtype)
    print(json.dumps({"shared_bytes": compiler.shared_bytes, "errors": compiler.errors}))
