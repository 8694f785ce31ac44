"""Every Triton kernel compiles for the GPUs that it serves and fits their shared memory. No GPU is needed."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from triton.runtime.jit import KernelInterface

from lightserve.common import triton_kernel

# of a thread block, by compute capability or AMD's name
SHARED_KIB = {"80": 163, "89": 99, "90": 227, "100": 227, "gfx942": 64, "gfx950": 160, "gfx1100": 64}
NVIDIA, AMD = ["80", "89", "90", "100"], ["gfx942", "gfx950", "gfx1100"]
HEAVY = [
    "_bmm_kernel",
    "_chunk_scan_kernel",
    "_context_attention_kernel",
    "_eight_bit_linear_kernel",
    "_expert_linear_kernel",
    "_int4_tiles_kernel",
    "_latent_context_attention_kernel",
    "_mla_batch_invariant_kernel",
    "_latent_token_attention_kernel",
    "_linear_int4_kernel",
    "_linear_kernel",
    "_norm_linear_kernel",
    "_quantized_expert_linear_kernel",
    "_score_tokens_kernel",
    "_shared_prefix_kernel",
    "_token_attention_kernel",
    "_weight_only_linear_kernel",
]
WITH_ASSEMBLY = {
    "_context_attention_kernel",
    "_int4_tiles_kernel",
    "_latent_token_attention_kernel",
    "_linear_int4_kernel",
    "_mla_batch_invariant_kernel",
    "_shared_prefix_kernel",
    "_token_attention_kernel",
}


def kernels() -> Iterator[str]:
    for module_info in pkgutil.walk_packages(triton_kernel.__path__, f"{triton_kernel.__name__}."):
        module = importlib.import_module(module_info.name)
        for name, value in vars(module).items():
            if isinstance(value, KernelInterface) and name.endswith("_kernel"):
                yield name


@cache
def report(card: str, which: str) -> Any:
    """What ``compile_kernels`` prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "test.ops.compile_kernels", card, which]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)


def assert_compiled(found: Any, card: str, kernel: str, *dtypes: str) -> None:
    assert kernel not in found["errors"], found["errors"][kernel]
    assert kernel in found["shared_bytes"], "no wrapper called by compile_kernels.py launches it"
    assert set(dtypes) <= found["shared_bytes"][kernel].keys()
    assert max(found["shared_bytes"][kernel].values()) <= SHARED_KIB[card] * 1024


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted(kernels()))
def test_a_kernel_compiles_for_an_h200_and_fits_its_shared_memory(kernel: str) -> None:
    """In one configuration of each. The others are compiled for every GPU, with --long."""
    assert_compiled(report("90", "each"), "90", kernel, "bfloat16")


@pytest.mark.long  # the sample for AMD below holds none either
def test_kernels_hold_assembly_only_for_a_device_that_has_it() -> None:
    plain = report("90", "without assembly")

    assert not plain["errors"]
    assert plain["with_assembly"] == []
    assert set(report("90", "all")["with_assembly"]) == WITH_ASSEMBLY
    assert plain["shared_bytes"].keys() >= WITH_ASSEMBLY


@pytest.mark.long
@pytest.mark.parametrize("kernel", HEAVY)
def test_a_kernel_with_large_tiles_fits_a_card_with_99_kib_of_shared_memory(kernel: str) -> None:
    assert_compiled(report("89", "heavy"), "89", kernel, "bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("card", NVIDIA)
def test_all_kernels_compile_for_every_gpu(card: str) -> None:
    for kernel in sorted(kernels()):
        assert_compiled(report(card, "every dtype"), card, kernel, "float32", "bfloat16", "float16")


@pytest.mark.slow
def test_kernels_of_a_decode_step_compile_for_amd() -> None:
    sample = report("gfx942", "sample")

    assert not sample["errors"]
    assert sample["with_assembly"] == []
    for kernel in ("_linear_kernel", "_linear_int4_kernel", "_rms_norm_kernel", "_token_attention_kernel"):
        assert_compiled(sample, "gfx942", kernel, "bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("card", AMD)
def test_all_kernels_compile_for_amd(card: str) -> None:
    for kernel in sorted(kernels()):
        assert_compiled(report(card, "all"), card, kernel, "bfloat16")
