from __future__ import annotations

import pytest

from benchmark.engine.step_profile import Kernel, gpu_table, gpu_time, kernels_of


def test_the_time_of_a_gpu_is_split_into_groups_and_gaps() -> None:
    kernels = [
        Kernel("nvjet_hsh_128x64", 0, 60),
        Kernel("_token_attention_split_kernel", 60, 90),
        Kernel("Memcpy DtoH", 80, 85),  # beside the other
        Kernel("_add_rms_norm_kernel", 95, 100),
    ]

    gpu = gpu_time(kernels)

    assert (gpu.span, gpu.idle) == (100, 5)
    assert gpu.groups == {"matmul": 60, "attention": 30, "copy": 5, "norm": 5}
    assert gpu.gaps == {"_token_attention_split_kernel -> _add_rms_norm_kernel": 5}
    assert gpu.busy_share == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "matmul"),
        ("_norm_linear_kernel", "matmul"),
        ("_top_k_top_p_min_p_search_kernel", "sampling"),
        ("_rotary_write_kv_kernel", "rotary and KV write"),
        ("_silu_and_mul_kernel", "activation"),
        ("_vocab_embedding_kernel", "embedding"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_a_kernel_is_known_by_its_name(name: str, group: str) -> None:
    assert Kernel(name, 0, 1).group == group


def test_only_what_ran_on_the_gpu_is_taken_from_a_trace() -> None:
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9},
            {"ph": "M", "name": "process_name"},
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10, "dur": 5},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy", "ts": 20, "dur": 1},
        ]
    }

    assert kernels_of(trace) == [Kernel("gemm", 10, 15), Kernel("Memcpy", 20, 21)]


def test_the_table_is_in_microseconds_a_step() -> None:
    kernels = [Kernel("gemm", begin, begin + 40) for begin in (0, 50, 100, 150)]

    table = gpu_table(gpu_time(kernels), steps=2)

    assert "95 us per step under the profiler, busy 84.2%, 2 kernels" in table
    assert "matmul                        80.0 us  84.2%" in table
    assert "15.0 us  gemm -> gemm" in table


def test_no_kernel_is_no_time() -> None:
    assert gpu_time([]).busy_share == 0
