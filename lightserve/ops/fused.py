"""Fused operators that aten lacks, as ``torch.ops.lightserve``. They have no backward pass, and say so.

Tensors may have any strides: what a kernel cannot read is copied first, and what it wrote is copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.device.base import bound_device
from lightserve.ops.attention import context_attention
from lightserve.ops.place import is_current

FUSED: list[str] = []
_refusals = torch.library.Library("lightserve", "IMPL")  # type: ignore[no-untyped-call]  # of backward passes


def _define(
    name: str,
    schema: str,
    shape: Callable[..., Any],
    mutates: Sequence[int] = (),
    call: Callable[..., Any] | None = None,
) -> None:
    """Register the op of this name.

    ``shape``: what it returns, for ``torch.compile``. ``mutates``: the numbers of the arguments that it writes.
    ``call``: the op with the arguments of the schema; None: they are its own.
    """
    called = ops.OPS[name] if call is None else call
    names = [argument.name for argument in torch._C.parse_schema(f"lightserve::{name}{schema}").arguments]
    written = [names[number] for number in mutates]
    layout = _are_heads if name in WITH_HEADS else _are_rows

    def compute(*args: Any) -> Any:
        _check_place(name, args)
        read = [_readable(*each, layout) for each in zip(names, args, strict=False)]  # trailing defaults are left out
        out = called(*read)
        for number in mutates:
            if read[number] is not args[number]:
                args[number].copy_(read[number])
        return None if schema.endswith("()") else out

    operator = torch.library.custom_op(f"lightserve::{name}", compute, mutates_args=written, schema=schema)
    operator.register_fake(shape)
    if mutates:
        _refuse_gradients(name)
    FUSED.append(name)


def _check_place(name: str, args: Sequence[Any]) -> None:
    """A kernel would read the memory of another device as its own."""
    platform = bound_device()
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if platform is None or all(is_current(tensor.device, platform) for tensor in tensors):
        return
    places = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
    raise ValueError(
        f"{name}: the tensors are on {places}, and kernels run on the current device of {platform.name}; "
        "move the tensors or make their device the current one, and call lightserve.ops.enable(device=...) for its kind"
    )


def _readable(name: str, arg: Any, is_readable: Callable[[Tensor], bool]) -> Any:
    """``arg``, or a copy of a tensor whose numbers have gaps. A cache is never copied: it takes most of the memory."""
    if not isinstance(arg, Tensor) or name == "kv_cache" or arg.is_contiguous() or is_readable(arg):
        return arg
    return arg.contiguous()


def _are_rows(x: Tensor) -> bool:
    """Parts of wider ones."""
    return x.dim() == 2 and x.stride(1) == 1


def _are_heads(x: Tensor) -> bool:
    """``[tokens, heads, dim]``, where those of a token lie side by side."""
    return _are_rows(x) or (x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2])


def _refuse_gradients(name: str) -> None:
    """Torch would take what the op writes for what was there before, and give wrong gradients without an error."""
    operator = getattr(torch.ops.lightserve, name).default

    def call(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            raise RuntimeError(
                f"lightserve::{name} writes into its arguments and has no backward pass, and one of them requires a "
                "gradient: call it within torch.no_grad()"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)

    _refusals.impl(name, call, "Autograd", with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]


def _like_first(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _half(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _nothing(*_: Any) -> None:
    """It writes in place."""


def _token_attention(
    q: Tensor, kv_cache: Tensor, req_to_token: Tensor, b_seq_len: Tensor, scale: float, window: int | None = None
) -> Tensor:
    rows = torch.arange(len(q), dtype=torch.int32, device=q.device)
    lengths = b_seq_len.int()
    batch = ops.AttnBatch(req_to_token, rows, rows, lengths, lengths - 1)
    return ops.token_attention(q, kv_cache, batch, ops.AttnOptions(scale, window=window))


def _route(
    logits: Tensor,
    top_k: int,
    renormalize: bool = False,
    bias: Tensor | None = None,
    score: str = "softmax",
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"route: score is {score!r}; there are softmax and sigmoid")
    kind = cast("Literal['softmax', 'sigmoid']", score)
    return ops.route(logits, ops.RouteSpec(top_k, kind, renormalize=renormalize, scale=scale), bias)


def _chosen(logits: Tensor, top_k: int, *_: Any) -> tuple[Tensor, Tensor]:
    shape = (len(logits), top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


WITH_HEADS = {"rotary", "write_kv", "token_attention", "context_attention"}  # of tensors [tokens, heads, dim]
NORM, ADD_NORM = "(Tensor x, Tensor weight, float eps)", "(Tensor x, Tensor(a!) residual, Tensor weight, float eps)"
LIMITS = "(Tensor(a!) logits, Tensor b_top_k, Tensor b_top_p, Tensor b_min_p) -> ()"
SAMPLE = "(Tensor logits, Tensor b_temperature, Tensor b_seed, Tensor b_position) -> Tensor"
TOKEN_ATTENTION = (
    "(Tensor q, Tensor kv_cache, Tensor req_to_token, Tensor b_seq_len, float scale, int? window=None) -> Tensor"
)
CONTEXT_ATTENTION = (
    "(Tensor q, Tensor kv, Tensor starts, int max_len, float scale, bool causal=True, int? window=None) -> Tensor"
)
ROUTE = (
    "(Tensor logits, int top_k, bool renormalize=False, Tensor? bias=None, str score='softmax', float scale=1.0)"
    " -> (Tensor, Tensor)"
)

_define("rms_norm", f"{NORM} -> Tensor", _like_first)
_define("add_rms_norm", f"{ADD_NORM} -> Tensor", _like_first, mutates=(1,))
_define("layer_norm", "(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor", _like_first)
for _gated in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "relu2_and_mul"):
    _define(_gated, "(Tensor gate_up) -> Tensor", _half)
_define("rotary", "(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin) -> ()", _nothing, mutates=(0, 1))
_define(
    "vocab_embedding",
    "(Tensor ids, Tensor table, int first_id) -> Tensor",
    lambda ids, table, first_id: table.new_empty((len(ids), table.shape[1])),
)
_define("write_kv", "(Tensor kv, Tensor slots, Tensor(a!) kv_cache) -> ()", _nothing, mutates=(2,))
_define("token_attention", TOKEN_ATTENTION, _like_first, call=_token_attention)
_define("context_attention", CONTEXT_ATTENTION, _like_first, call=context_attention)
_define("route", ROUTE, _chosen, call=_route)
_define("top_k_top_p_min_p", LIMITS, _nothing, mutates=(0,))
_define("sample", SAMPLE, lambda logits, *_: logits.new_empty(len(logits), dtype=torch.int64))
