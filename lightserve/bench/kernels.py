"""How close each op comes to the limits of the device at the shapes of a model's steps, compared with torch.

    python -m lightserve.bench.kernels [--ops token_attention linear]

The shapes are those of Llama-3-8B. On a CPU (--device cpu) they are tiny, to try the program. The limits are measured
first, in the same run. Calls rotate over more memory than the cache holds and are replayed as a CUDA graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from lightserve.bench.ceilings import Ceilings, measure_ceilings, seconds_per_call
from lightserve.bench.kernel_cases import LLAMA3_8B, TINY, Case, InputFactory, Inputs, cases_of
from lightserve.bench.kv_dtype_cases import kv_dtype_cases
from lightserve.common.device import pick_device
from lightserve.errors import ServerError

ROTATED_BYTES = 256 * 2**20  # over five times the L2 cache of an H200
HEADER = (  # of the rows of row_of
    f"{'op':20} {'rows or requests':>16} {'us':>10} {'reached':>16} {'of most':>7} "
    f"{'torch us':>10} {'reached':>8} {'faster':>9}"
)
MAX_COPIES = 128  # of the inputs; the inputs of the smallest ops stay in the cache, as in a step


def seconds_of(case: Case, factory: InputFactory, call: Callable[..., object], inputs: Inputs) -> float:
    copies = min(max(2, round(ROTATED_BYTES / case.num_bytes)), MAX_COPIES if factory.device.type != "cpu" else 2)
    return seconds_per_call([partial(call, *inputs(factory)) for _ in range(copies)], factory.device)


def row_of(case: Case, factory: InputFactory, ceilings: Ceilings) -> str:
    ours_s = seconds_of(case, factory, case.ours, case.inputs)
    floor_s = ceilings.floor_s(case.num_bytes, case.flops)
    is_memory_bound = case.num_bytes / ceilings.bytes_per_s == floor_s
    amount, unit = (case.num_bytes, "TB/s") if is_memory_bound else (case.flops, "TFLOP/s")
    row = f"{case.op:20} {case.load:>16} {ours_s * 1e6:10.1f} {amount / ours_s / 1e12:8.2f} {unit:7} "
    row += f"{floor_s / ours_s:7.1%}"
    if case.torch is None:
        return row
    torch_s = seconds_of(case, factory, case.torch, case.torch_inputs or case.inputs)
    return row + f" {torch_s * 1e6:10.1f} {amount / torch_s / 1e12:8.2f} {torch_s / ours_s:8.2f}x"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda; omitted: the best one here")
    parser.add_argument("--ops", nargs="+", default=[""], help="only those whose name contains one of these")
    args = parser.parse_args(argv)
    kind = pick_device(args.device)
    if kind.name == "cpu" and args.device is None:
        raise ServerError("the kernel benchmark needs a GPU; --device cpu tries the program on tiny shapes")
    device, dtype = kind.torch_device(0), kind.dtypes[0]
    kind.bind(device)
    ceilings = measure_ceilings(device, dtype)
    shape = TINY if kind.name == "cpu" else LLAMA3_8B
    cases = [*cases_of(shape, dtype), *kv_dtype_cases(shape, dtype.itemsize)]
    print(f"{str(dtype).removeprefix('torch.')} on {kind.name}; {ceilings}")
    print(HEADER)
    for case in cases:
        if any(substring in case.op for substring in args.ops):
            print(row_of(case, InputFactory(device, dtype), ceilings), flush=True)


if __name__ == "__main__":
    main()
