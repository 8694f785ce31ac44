"""Torch's attention by our kernel for prompts, and by torch's own for all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lightserve.ops
from test.aten.devices import DEVICES, enable_all, on
from test.aten.test_aten import calls
from test.ops.cases import TOLERANCE, randn

NAME = "scaled_dot_product_attention"
attend: Callable[..., Tensor] = F.scaled_dot_product_attention


def qkv(device: str, heads: int = 4, kv_heads: int = 2, dim: int = 16, **options: Any) -> tuple[Tensor, ...]:
    """Of 2 texts with 5 tokens."""
    return tuple(
        randn(2, count, 5, dim, device=on(device), seed=seed, **options)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    )


each_with_kernel = pytest.mark.parametrize("device", DEVICES[1:])  # a CPU's attention stays torch's


@each_with_kernel
@pytest.mark.parametrize(
    ("dtype", "is_causal", "heads", "kv_heads", "dim", "scale"),
    [
        (torch.float32, True, 4, 2, 16, None),
        (torch.float32, False, 3, 3, 40, 0.3),
        (torch.float16, True, 3, 3, 40, 0.3),
        (torch.float16, False, 6, 1, 64, None),
    ],
)
def test_prompts_are_computed_by_our_kernel(  # noqa: PLR0913  its parameters are the case
    device: str, dtype: torch.dtype, is_causal: bool, heads: int, kv_heads: int, dim: int, scale: float | None
) -> None:
    q, k, v = qkv(device, heads, kv_heads, dim, dtype=dtype)
    wide = [tensor.float() for tensor in (q, k, v)]
    expected = attend(*wide, is_causal=is_causal, scale=scale, enable_gqa=heads != kv_heads)

    lightserve.ops.only_enable([NAME], device=device)
    out = attend(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=heads != kv_heads)

    assert calls() == {NAME: 1}
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, **TOLERANCE[dtype])


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "a part of one product": lambda x: (
        torch.cat((x, x), 1).transpose(1, 2).contiguous().transpose(1, 2)[:, : x.shape[1]]
    ),
    "every other number": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[:1, :1].expand_as(x),
    "last tokens first": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@each_with_kernel
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_prompts_may_have_any_strides(device: str, change: Callable[[Tensor], Tensor]) -> None:
    args = [change(tensor) for tensor in qkv(device)]
    expected = attend(*args, is_causal=True, enable_gqa=True)

    lightserve.ops.only_enable([NAME], device=device)
    out = attend(*args, is_causal=True, enable_gqa=True)

    assert calls() == {NAME: 1}
    torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32])


@each_with_kernel
@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_parameters_are_no_obstacle_without_gradients(device: str, no_grad: Callable[[], Any]) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv(device, 2))
    lightserve.ops.only_enable([NAME], device=device)

    with no_grad():
        out = attend(q, k, v)

    assert calls() == {NAME: 1}
    assert not out.requires_grad


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, torch.ones(5, 5, dtype=torch.bool, device=q.device).tril(), enable_gqa=True)


OF_TORCH: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mask": masked,
    "a decode step": lambda q, k, v: attend(q[:, :, -1:], k, v, enable_gqa=True),
    "other keys": lambda q, k, v: attend(q[:, :, :3], k, v, is_causal=True, enable_gqa=True),
    "narrow values": lambda q, k, v: attend(q, k, v[..., :8], enable_gqa=True),
    "one text of three dimensions": lambda q, k, v: attend(q[0, :2], k[0], v[0]),
    "broadcast heads": lambda q, k, v: attend(q, k[:, :1], v[:, :1]),
    "float64": lambda q, k, v: attend(q.double(), k.double(), v.double(), enable_gqa=True),
    "no tokens": lambda q, k, v: attend(q[:, :, :0], k[:, :, :0], v[:, :, :0], enable_gqa=True),
    "no texts": lambda q, k, v: attend(q[:0], k[:0], v[:0], enable_gqa=True),
}


@each_with_kernel
@pytest.mark.parametrize("call", OF_TORCH.values(), ids=OF_TORCH)
def test_all_else_is_computed_by_torch(device: str, call: Callable[..., Tensor]) -> None:
    args = qkv(device)
    expected = call(*args)

    lightserve.ops.only_enable([NAME], device=device)
    out = call(*args)

    assert calls() == {}
    torch.testing.assert_close(out, expected)


@each_with_kernel
def test_dropout_is_torchs(device: str) -> None:
    q, k, v = qkv(device, 2)
    torch.manual_seed(0)
    expected = attend(q, k, v, dropout_p=0.5)

    lightserve.ops.only_enable([NAME], device=device)
    torch.manual_seed(0)
    out = attend(q, k, v, dropout_p=0.5)

    assert torch.equal(out, expected)


def by_backward(call: Callable[..., Tensor], args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    leaves = [tensor.clone().requires_grad_() for tensor in args]
    return torch.autograd.grad(call(*leaves).square().sum(), leaves)


def by_jvp(call: Callable[..., Tensor], args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out: tuple[Tensor, ...] = torch.func.jvp(call, args, tuple(tensor.cos() for tensor in args))
    return out


def by_func_grad(call: Callable[..., Tensor], args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    grads: tuple[Tensor, ...] = torch.func.grad(lambda *a: call(*a).square().sum(), argnums=(0, 1, 2))(*args)
    return grads


def by_vmap(call: Callable[..., Tensor], args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.func.vmap(call)(*(torch.stack((tensor, tensor.sin())) for tensor in args)),)


def by_compiled(call: Callable[..., Tensor], args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    compiled: Any = torch.compile(call, backend="aot_eager", fullgraph=True)
    return (compiled(*args),)


def by_functionalized(call: Callable[..., Tensor], args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.func.functionalize(call)(*args),)


TRANSFORMS = [by_backward, by_jvp, by_func_grad, by_vmap, by_compiled, by_functionalized]


@each_with_kernel
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients_and_other_transforms_are_those_of_torch(device: str, transform: Callable[..., Any]) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, is_causal=True)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # which has all formulas
        args = qkv(device, 2)
        expected = transform(call, args)
        torch._dynamo.reset()
        enable_all(device)
        actual = transform(call, args)

    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@each_with_kernel
def test_what_is_traced_is_what_torch_composes(device: str) -> None:
    args = qkv(device, 2)
    names = []
    for is_enabled in (False, True):
        if is_enabled:
            lightserve.ops.only_enable([NAME], device=device)
        with Recorded() as recorded:
            attend(*args)
        names.append(recorded.names)

    assert names[0] == names[1]


@each_with_kernel
def test_tensors_without_memory_have_the_shape_that_torch_says(device: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args = [mode.from_tensor(tensor) for tensor in qkv(device, 2)]

    lightserve.ops.only_enable([NAME], device=device)

    assert attend(*args).shape == (2, 2, 5, 16)
