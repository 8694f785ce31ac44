"""Compile two kernels ahead for an H200 that is not there; prints as JSON what came of it. A process of its own."""

from __future__ import annotations

import json

import torch
from triton.runtime import driver

from lightserve.common.compile_ahead import compile_ahead
from lightserve.common.triton_kernel import activation
from test.ops.compile_kernels import AbsentH200

if __name__ == "__main__":
    driver.set_active(AbsentH200())
    entered: list[int] = []
    with compile_ahead(lambda: entered.append(1)):
        outs = [activation.silu_and_mul(torch.ones(2, width)) for width in (64, 64, 6)]
    compiled = len(activation._activation_kernel.device_caches[0][0])
    print(json.dumps({"compiled": compiled, "entered": len(entered), "zero": not any(out.any() for out in outs)}))
