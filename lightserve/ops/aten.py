"""Aten operators that our ops compute, registered by torch.library for the tensors of a device.

Autograd stays above them. Its formulas of activations, products, softmax and top-k need inputs and results alone, so
the forward pass is ours. Those of norms and attention need what our kernels do not return: while a gradient is wanted,
these are torch's.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.device import Device
from lightserve.common.ops.registry import Op
from lightserve.errors import ServerError
from lightserve.ops import attention, reductions
from lightserve.ops.arguments import FLOATS, wants_grad
from lightserve.ops.place import is_current


class AtenOp(NamedTuple):
    op: Op[Any, Any]  # which must have a kernel
    compute: Callable[..., Any]  # with aten's arguments
    takes: Callable[..., bool]  # whether the kernel computes these arguments
    is_for_cpu: bool = True  # False: torch's is faster there
    is_above_autograd: bool = False  # aten composes it of others, which have the formulas
    pays: bool = True  # False: no faster than torch's on an H200, so it is replaced only by its name


def _is_rows(x: Tensor) -> bool:
    """Rows of numbers side by side, which kernels read without a copy."""
    return x.dtype in FLOATS and x.dim() > 0 and x.numel() > 0 and x.is_contiguous()


def _takes_gelu(x: Tensor, *, approximate: str = "none") -> bool:
    return _is_rows(x) and approximate in ("none", "tanh")


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return ops.gelu(x) if approximate == "none" else ops.gelu_tanh(x)


def _is_weight_of(weight: Tensor | None, x: Tensor, shape: Sequence[int]) -> bool:
    return weight is not None and weight.is_contiguous() and weight.dtype == x.dtype and list(shape) == [x.shape[-1]]


def _takes_layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> bool:
    has_weights = _is_weight_of(weight, x, shape) and _is_weight_of(bias, x, shape)
    return _is_rows(x) and has_weights and not wants_grad(x, weight, bias)


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
    """The statistics are for a backward pass, which there is none of."""
    statistics = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return ops.layer_norm(x, weight, bias, eps), statistics, statistics


def _takes_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> bool:
    return _is_rows(x) and _is_weight_of(weight, x, shape) and eps is not None and not wants_grad(x, weight)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    return ops.rms_norm(x, weight, eps), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _takes_mm(x: Tensor, weight_t: Tensor) -> bool:
    """The product with a transposed weight, as ``F.linear`` writes it."""
    are_floats = x.dtype in FLOATS and x.dtype == weight_t.dtype and x.device == weight_t.device
    return are_floats and x.numel() > 0 and weight_t.numel() > 0 and x.stride(1) == 1 and weight_t.stride(0) == 1


def _mm(x: Tensor, weight_t: Tensor) -> Tensor:
    return ops.linear(x, weight_t.T)


def _takes_addmm(bias: Tensor, x: Tensor, weight_t: Tensor, *, beta: float = 1, alpha: float = 1) -> bool:
    is_bias = bias.dim() == 1 and len(bias) == weight_t.shape[1] and bias.stride(0) == 1 and bias.dtype == x.dtype
    return is_bias and beta == 1 and alpha == 1 and _takes_mm(x, weight_t)


def _addmm(bias: Tensor, x: Tensor, weight_t: Tensor) -> Tensor:
    return ops.linear(x, weight_t.T, bias)


def _takes_bmm(x: Tensor, y: Tensor) -> bool:
    do_match = x.dim() == y.dim() == 3 and x.shape[0] == y.shape[0] and x.shape[2] == y.shape[1]
    return do_match and x.dtype in FLOATS and x.dtype == y.dtype and x.device == y.device


def _takes_embedding(weight: Tensor, ids: Tensor, *_: Any) -> bool:
    are_ids = ids.dtype in (torch.int64, torch.int32) and ids.is_contiguous() and ids.device == weight.device
    return are_ids and weight.dtype in FLOATS and weight.dim() == 2 and weight.stride(1) == 1


def _embedding(weight: Tensor, ids: Tensor, *_: Any) -> Tensor:
    return ops.vocab_embedding(ids.view(-1), weight, 0).view(*ids.shape, weight.shape[1])


ATEN: dict[str, AtenOp] = {
    "silu": AtenOp(ops.silu, ops.silu, _is_rows),
    "gelu": AtenOp(ops.gelu, _gelu, _takes_gelu),
    "relu": AtenOp(ops.relu, ops.relu, _is_rows),
    "native_layer_norm": AtenOp(ops.layer_norm, _layer_norm, _takes_layer_norm),
    "_fused_rms_norm": AtenOp(ops.rms_norm, _rms_norm, _takes_rms_norm),
    "mm": AtenOp(ops.linear, _mm, _takes_mm, is_for_cpu=False, pays=False),
    "addmm": AtenOp(ops.linear, _addmm, _takes_addmm, is_for_cpu=False, pays=False),
    "bmm": AtenOp(ops.bmm, ops.bmm, _takes_bmm, is_for_cpu=False, pays=False),
    "embedding": AtenOp(ops.vocab_embedding, _embedding, _takes_embedding),
    "_softmax": AtenOp(ops.softmax, reductions.softmax, reductions.takes_softmax),
    "_log_softmax": AtenOp(ops.log_softmax, reductions.log_softmax, reductions.takes_softmax),
    "topk": AtenOp(ops.top_k, reductions.topk, reductions.takes_topk),
    "scaled_dot_product_attention": AtenOp(
        ops.context_attention,
        attention.scaled_dot_product_attention,
        attention.takes_prompts,
        is_for_cpu=False,
        is_above_autograd=True,
        pays=False,
    ),
}
PAYING = tuple(name for name, replaced in ATEN.items() if replaced.pays)


def dispatch_key(torch_type: str) -> str:
    """Of the tensors of a device, by its name in torch. Devices of other packages have one key, and rename its type."""
    if torch_type in ("privateuseone", torch._C._get_privateuse1_backend_name()):
        return "PrivateUse1"
    if not hasattr(torch._C.DispatchKey, torch_type.upper()):
        raise ServerError(f"torch has no kernels for tensors of the type {torch_type}, so none can be replaced")
    return torch_type.upper()


class Replacement:
    """Operators that are replaced until ``remove``."""

    def __init__(self, platform: Device, names: Sequence[str]) -> None:
        self.platform = platform
        self.calls: dict[str, int] = {}  # of our kernels
        key = dispatch_key(platform.torch_type)
        self._keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        self._inside = threading.local()  # an op of ours may call the operator that it replaces
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self.names = [name for name in names if self._is_replaceable(name, key)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name in self.names:
                compute = self._wrapped(name, key)
                for each in (key, f"Autograd{key}") if ATEN[name].is_above_autograd else (key,):
                    self._library.impl(name, compute, each, allow_override=True)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        self._library._destroy()  # type: ignore[no-untyped-call]

    def _is_replaceable(self, name: str, key: str) -> bool:
        """A CPU's products keep copies of weights for each tensor, and aten transposes weights into new ones."""
        if ATEN[name].op.active_backend == ops.REFERENCE or (
            self.platform.ops_backend == "cpu" and not ATEN[name].is_for_cpu
        ):
            return False
        keys = [key, "CompositeExplicitAutograd"]  # one kernel for all devices, which Autograd calls by this key too
        if ATEN[name].is_above_autograd:
            keys = ["CompositeImplicitAutograd"]
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", each) for each in keys)

    def _wrapped(self, name: str, key: str) -> Callable[..., Any]:
        replaced, original = ATEN[name], torch.library.get_kernel(f"aten::{name}", key)

        def call(*args: Any, **kwargs: Any) -> Any:
            is_ours = replaced.takes(*args, **kwargs) and is_current(args[0].device, self.platform)
            if getattr(self._inside, "is_true", False) or not is_ours:
                return original.call_boxed(self._keys, *args, **kwargs)
            self._inside.is_true = True
            try:
                self.calls[name] = self.calls.get(name, 0) + 1
                return replaced.compute(*args, **kwargs)
            finally:
                self._inside.is_true = False

        return call
