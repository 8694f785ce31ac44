"""Every op on the device beside its definition, in every dtype of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.device import Device
from lightserve.common.ops.registry import Op
from lightserve.conformance.inputs.op_args import ARGS

TOKENS = (1, 3, 17)
# of the length of the difference to that of the definition's result; both round their steps to the dtype
LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Of 8-bit codes: numbers in the middle between two may be rounded to either. An op that is made of finer ones may round
# what it quantises before, in bfloat16 by up to a quarter of a code.
MAX_OTHER_CODES = {torch.float32: 0.02, torch.float16: 0.02, torch.bfloat16: 0.25}
# The number of the argument that nobody may read after a call: the sum is in it, or elsewhere.
UNDEFINED_AFTER = {"add_rms_norm_gate_up": 1, "add_rms_norm_linear": 1, "add_rms_norm_lora_linear": 1}
FLOAT8_STEP = 0.13  # from a number in e4m3 to the next, at most

NATIVE, COMPOSED, MISSING = "native", "composed", "missing"


@dataclass(slots=True)
class OpReport:
    name: str
    kind: str  # NATIVE: the device's kernels; COMPOSED: the definition, of native ops; MISSING: the definition in torch
    backend: str
    errors: dict[torch.dtype, float] = field(default_factory=dict)  # the largest of each dtype
    problems: list[str] = field(default_factory=list)


def check_ops(platform: Device, device: torch.device, names: Sequence[str], bind: Callable[[], None]) -> list[OpReport]:
    """``bind``: makes ``device`` the one of this process, which it is afterwards."""
    dtypes = [dtype for dtype in platform.dtypes if dtype in LIMITS and platform.has_dtype(dtype)]
    bind()
    ops.use_backend(ops.REFERENCE)
    expected = {(name, *case): _outcome(name, *case, device) for name in names for case in _cases(dtypes)}
    bind()
    platform.compile_kernels(device, lambda: _launch_all(names, dtypes, device))
    reports = [OpReport(name, kind_of(ops.OPS[name]), ops.OPS[name].active_backend) for name in names]
    for report in reports:
        for dtype, tokens in _cases(dtypes):
            _compare(report, expected[report.name, dtype, tokens], _outcome(report.name, dtype, tokens, device), dtype)
    return reports


def _launch_all(names: Sequence[str], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    for name in names:
        for case in _cases(dtypes):
            _outcome(name, *case, device)


def _cases(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[torch.dtype, int]]:
    return ((dtype, tokens) for dtype in dtypes for tokens in TOKENS)


def kind_of(op: Op[Any, Any]) -> str:
    if op.active_backend != ops.REFERENCE:
        return NATIVE
    return COMPOSED if any(inner.active_backend != ops.REFERENCE for inner in _ops_inside(op, set())) else MISSING


def _ops_inside(op: Op[Any, Any], seen: set[str]) -> Iterator[Op[Any, Any]]:
    """The ops that the definition calls, and those that their definitions call."""
    definition = op.impls[ops.REFERENCE]
    seen.add(op.name)
    for name in definition.__code__.co_names:
        called = definition.__globals__.get(name)
        if isinstance(called, Op) and called.name not in seen:
            yield called
            yield from _ops_inside(called, seen)


def _outcome(name: str, dtype: torch.dtype, tokens: int, device: torch.device) -> list[Tensor] | str:
    """What the op returns and has written, in host memory; or why it fails."""
    args = ARGS[name](tokens, dtype, device.type)
    try:
        out = ops.OPS[name](*args)
        defined = tuple([arg for number, arg in enumerate(args) if number != UNDEFINED_AFTER.get(name)])
        return [tensor.cpu() for tensor in (*tensors_in(out), *tensors_in(defined))]
    except Exception as error:  # a vendor's library may raise anything; the other ops go on
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for attribute in fields(value):
            yield from tensors_in(getattr(value, attribute.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)


def _compare(report: OpReport, expected: list[Tensor] | str, actual: list[Tensor] | str, dtype: torch.dtype) -> None:
    if isinstance(expected, str):
        report.problems.append(f"the definition fails in {dtype}: {expected}")
    elif isinstance(actual, str):
        report.problems.append(f"fails in {dtype}: {actual}")
    elif [tensor.shape for tensor in expected] != [tensor.shape for tensor in actual]:
        report.problems.append(f"{dtype}: other shapes than the definition")
    else:
        error = max((_distance(*pair, dtype) for pair in zip(actual, expected, strict=True)), default=0.0)
        report.errors[dtype] = max(report.errors.get(dtype, 0.0), error)
        if not error <= LIMITS[dtype]:
            report.problems.append(f"{dtype}: {error:.1e} from the definition; the limit is {LIMITS[dtype]:.1e}")


def _distance(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Relative, of what an op gives for numbers of ``dtype``.

    0 for codes that differ by rounding, infinite for other dtypes, integers or infinities.
    """
    if actual.dtype != expected.dtype:
        return torch.inf
    if expected.dtype in (torch.int8, torch.float8_e4m3fn):
        return 0.0 if _are_codes_close(actual.float(), expected.float(), MAX_OTHER_CODES[dtype]) else torch.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else torch.inf
    wide, wanted = actual.double(), expected.double()
    is_number = wanted.isfinite()
    if not torch.equal(wide.where(~is_number, 0).nan_to_num(3), wanted.where(~is_number, 0).nan_to_num(3)):
        return torch.inf
    difference = (wide - wanted)[is_number].norm()
    return float(difference / wanted[is_number].norm().clamp(min=1e-6))


def _are_codes_close(actual: Tensor, expected: Tensor, max_other: float) -> bool:
    differs = actual.nan_to_num(999) != expected.nan_to_num(999)
    steps = (actual - expected).abs() <= torch.clamp(expected.abs() * FLOAT8_STEP, min=1)
    return not differs.any() or bool(steps[differs].all() and differs.float().mean() <= max_other)
