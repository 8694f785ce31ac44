"""Aten operators that are replaced give torch's results and gradients, in every dtype and with any strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lightserve.ops
from lightserve.common import ops
from lightserve.common.device.cpu import CpuDevice
from lightserve.errors import ServerError
from lightserve.ops import aten
from lightserve.ops.aten import dispatch_key
from lightserve.ops.place import current_device, is_current
from test.aten.devices import DEVICES, each_device, enable_all, on
from test.ops.cases import FLOATS, TOLERANCE, randn

ROWS, WIDTH = 5, 64


def numbers(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return randn(*shape, dtype=dtype, device=on(device), seed=seed)


def layer_norm(x: Tensor) -> Tensor:
    weight, bias = (randn(x.shape[-1], seed=seed).to(x.device, x.dtype) for seed in (3, 4))
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), randn(x.shape[-1], seed=3).to(x.device, x.dtype), 1e-5)


def linear(x: Tensor) -> Tensor:
    return F.linear(x, (randn(48, x.shape[-1], seed=3) / 8).to(x.device, x.dtype))


def linear_with_bias(x: Tensor) -> Tensor:
    return F.linear(x, (randn(48, x.shape[-1], seed=3) / 8).to(x.device, x.dtype), randn(48).to(x.device, x.dtype))


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def embedding(x: Tensor) -> Tensor:
    table = x.reshape(-1, x.shape[-1])
    ids = torch.arange(len(table), device=x.device).flip(0)[:4]
    return F.embedding(torch.stack((ids, ids)), table)


def bmm(x: Tensor) -> Tensor:
    return torch.bmm(x.reshape(-1, 1, x.shape[-1]), x.reshape(-1, x.shape[-1], 1) / 8)


def attention(x: Tensor) -> Tensor:
    q = x.reshape(1, -1, 4, x.shape[-1] // 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q.flip(2), q.flip(1), is_causal=True)


CALLS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "silu": ("silu", F.silu),
    "relu": ("relu", F.relu),
    "gelu": ("gelu", F.gelu),
    "tanh_gelu": ("gelu", tanh_gelu),
    "layer_norm": ("native_layer_norm", layer_norm),
    "rms_norm": ("_fused_rms_norm", rms_norm),
    "linear": ("mm", linear),
    "linear_with_bias": ("addmm", linear_with_bias),
    "embedding": ("embedding", embedding),
    "softmax": ("_softmax", lambda x: x.softmax(-1)),
    "log_softmax": ("_log_softmax", lambda x: F.log_softmax(x, -2)),
    "topk": ("topk", lambda x: x.topk(3).values),
    "bmm": ("bmm", bmm),
    "attention": ("scaled_dot_product_attention", attention),
}
WITH_DOT = {"linear", "linear_with_bias", "bmm", "attention"}  # of Triton, which is wrong in bfloat16 if interpreted
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "part of wider rows": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "every other column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda x: x.T.contiguous().T,
    "expanded": lambda x: x[:1].expand_as(x),
    "three dimensions": lambda x: x.reshape(1, *x.shape),
    "no rows": lambda x: x[:0],
}


def calls() -> dict[str, int]:
    assert lightserve.ops._active is not None
    return lightserve.ops._active.calls


@each_device
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("strides", STRIDES)
def test_an_operator_gives_the_result_of_torch(device: str, call: str, dtype: torch.dtype, strides: str) -> None:
    if device == "interpreted" and dtype == torch.bfloat16 and call in WITH_DOT:
        pytest.skip("the interpreter's dot is wrong in bfloat16")
    _, function = CALLS[call]
    x = STRIDES[strides](numbers(ROWS, WIDTH, dtype=dtype, device=device))
    expected = function(x)

    enable_all(device)
    with torch.no_grad():
        out = function(x)

    assert (out.dtype, out.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(out.float(), expected.float(), **TOLERANCE[dtype])


@each_device
@pytest.mark.parametrize("call", CALLS)
def test_rows_are_computed_by_our_kernel_if_the_device_has_one(device: str, call: str) -> None:
    name, function = CALLS[call]
    x = numbers(ROWS, WIDTH, dtype=torch.float32, device=device)

    replaced = enable_all(device)
    with torch.no_grad():
        function(x)

    assert calls() == ({name: 1} if name in replaced else {})
    if device != "cpu":
        assert {*lightserve.ops.ATEN} - {*replaced} <= {"_fused_rms_norm"}  # which only some devices have


@each_device
@pytest.mark.parametrize("call", CALLS)
def test_derivatives_beside_the_forward_pass_are_those_of_torch(device: str, call: str) -> None:
    x = numbers(ROWS, WIDTH, dtype=torch.float32, device=device)
    found = []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # which has the formulas
        for is_enabled in (False, True):
            if is_enabled:
                enable_all(device)
            found.append(torch.func.jvp(CALLS[call][1], (x,), (x.cos(),)))

    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@each_device
@pytest.mark.parametrize("call", CALLS)
def test_gradients_are_those_of_torch(device: str, call: str) -> None:
    x = numbers(ROWS, WIDTH, dtype=torch.float32, device=device)
    grads = []
    for is_enabled in (False, True):
        if is_enabled:
            enable_all(device)
        leaf = x.clone().requires_grad_()
        CALLS[call][1](leaf).square().sum().backward()  # type: ignore[no-untyped-call]
        grads.append(leaf.grad)

    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_some_operators_are_replaced_and_the_others_are_torchs_again_afterwards() -> None:
    x = randn(ROWS, WIDTH)
    assert lightserve.ops.only_enable(["silu", "relu"], device="interpreted" if "interpreted" in DEVICES else "cpu")
    assert "silu" in lightserve.ops.enabled()

    with lightserve.ops.use_ops(include=["gelu"], device="cpu") as inside:
        assert inside == lightserve.ops.enabled() == [name for name in ("gelu",) if "cpu_native" in ops.gelu.impls]
        F.silu(x)
        assert "silu" not in calls()
    assert "silu" in lightserve.ops.enabled()
    F.silu(x)
    if not torch.cuda.is_available():
        assert calls() == {"silu": 1}

    lightserve.ops.disable()
    assert lightserve.ops.enabled() == []


def test_products_and_attention_are_replaced_only_by_name() -> None:
    by_name = {"mm", "addmm", "bmm", "scaled_dot_product_attention"}
    device = DEVICES[1]

    assert set(enable_all(device)) - set(lightserve.ops.enable(device=device)) == by_name
    assert by_name.isdisjoint(lightserve.ops.enabled())
    with lightserve.ops.use_ops(device=device) as inside:
        assert by_name.isdisjoint(inside)
    with lightserve.ops.use_ops(["mm"], device=device) as inside:
        assert inside == ["mm"]


def test_an_exception_inside_restores_the_operators_of_torch() -> None:
    with pytest.raises(KeyError), lightserve.ops.use_ops(device="cpu"):
        raise KeyError

    assert lightserve.ops.enabled() == []


def test_what_was_enabled_stays_if_there_is_no_such_device_or_others_are_enabled_inside() -> None:
    assert lightserve.ops.only_enable(["gelu"], device="cpu")

    with pytest.raises(ServerError, match="nodevice"):
        lightserve.ops.use_ops(device="nodevice").__enter__()
    assert lightserve.ops.enabled() == ["gelu"]
    with lightserve.ops.use_ops(include=["silu"], device="cpu"):
        lightserve.ops.only_enable(["relu"], device="cpu")

    assert lightserve.ops.enabled() == ["gelu"]
    F.gelu(randn(ROWS, WIDTH))
    assert calls() == {"gelu": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: lightserve.ops.only_enable(["silo"]),
        lambda: lightserve.ops.enable(exclude=["silo"]),
        lambda: lightserve.ops.use_ops(exclude=["silo"]).__enter__(),
    ],
)
def test_an_operator_that_cannot_be_replaced_is_refused_with_those_that_can(wrong: Callable[[], Any]) -> None:
    with pytest.raises(ServerError, match=r"operator 'silo' cannot be replaced; did you mean silu\? there are silu"):
        wrong()


def test_the_tensors_of_a_vendor_have_the_key_that_torch_keeps_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")

    assert [dispatch_key(name) for name in ("cpu", "cuda", "xpu", "npu")] == ["CPU", "CUDA", "XPU", "PrivateUse1"]
    with pytest.raises(ServerError, match="torch has no kernels for tensors of the type tpu"):
        dispatch_key("tpu")


@pytest.mark.parametrize(("current", "is_ours"), [(0, False), (1, True)])
def test_kernels_take_only_tensors_of_the_device_that_they_are_launched_on(
    monkeypatch: pytest.MonkeyPatch, current: int, is_ours: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    platform = CpuDevice()
    monkeypatch.setattr(CpuDevice, "torch_type", "xpu")
    monkeypatch.setattr(CpuDevice, "torch_device", lambda self, index: torch.device("xpu", index))

    assert current_device(platform) == torch.device("xpu", current)
    assert is_current(torch.device("xpu", 1), platform) is is_ours
    assert not is_current(torch.device("cuda", current), platform)


def test_an_operator_on_another_device_stays_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    lightserve.ops.only_enable(["silu"], device="cpu")
    monkeypatch.setattr(aten, "is_current", lambda device, platform: False)

    torch.testing.assert_close(F.silu(torch.ones(3)), torch.ones(3).sigmoid())

    assert calls() == {}
