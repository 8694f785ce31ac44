"""Compile two kernels ahead for an H200 that is not there; print the result as JSON. A process of its own.

With a path as argument, a compile server that listens there compiles.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lightserve.common.compile.ahead import compile_ahead
from lightserve.common.compile.client import compile_server
from lightserve.common.triton_kernel.norm import activation
from test.ops.compile_kernels import AbsentCard

if __name__ == "__main__":
    driver.set_active(AbsentCard(GPUTarget("cuda", 90, 32)))
    entered: list[int] = []
    compiled_here: list[bool] = []

    def note(*, cache_hit: bool, **_: Any) -> None:
        compiled_here.append(not cache_hit)

    knobs.compilation.listener = note
    with compile_server(sys.argv[1]) if len(sys.argv) > 1 else nullcontext(), compile_ahead(lambda: entered.append(1)):
        outs = [activation.silu_and_mul(torch.ones(2, width)) for width in (64, 64, 6)]
    found = {
        "compiled": len(activation._activation_kernel.device_caches[0][0]),
        "compiled_here": sum(compiled_here),
        "entered": len(entered),
        "zero": not any(out.any() for out in outs),
        "left": [path for path in sys.argv[1:] if os.path.exists(path)],
    }
    print(json.dumps(found))
