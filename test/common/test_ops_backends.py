"""Operators of other packages, for a device that exists already, and layouts of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint

import pytest
import torch

from lightserve.common import ops
from lightserve.common.device import device_named, ops_backends
from lightserve.common.ops import repack
from lightserve.common.quantization import LinearPart, LinearSpec, QuantizedLinear
from lightserve.common.quantization.on_load import OnLoadFormat
from lightserve.conformance.inputs.tensors import randn
from lightserve.errors import ServerError
from lightserve.model_files.quantization import OnLoadScheme

CPU = torch.device("cpu")
INSTALLED = {
    "fake_norms": "test.fake_vendor.norms",
    "misnamed": "test.fake_vendor.norms",
    "outdated": "test.fake_vendor.outdated",
    "absent": "no_such_package.kernels",
}


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As pip would have installed them."""
    found = [EntryPoint(name, value, ops_backends.ENTRY_POINTS) for name, value in INSTALLED.items()]
    monkeypatch.setattr(ops_backends, "entry_points", lambda group: found if group == "lightserve.ops" else [])
    yield
    ops.use_backend(ops.REFERENCE)


def test_operators_of_a_package_are_preferred_to_those_of_the_device() -> None:
    device_named("cpu").bind(CPU, ops_backends=["fake_norms"])
    from test.fake_vendor import norms

    assert ops.rms_norm._active is norms.rms_norm
    assert ops.layer_norm._active is ops.layer_norm.impls["cpu"]
    x, weight = randn(3, 8), randn(8, seed=1)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), ops.rms_norm.impls[ops.REFERENCE](x, weight, 1e-5))

    device_named("cpu").bind(CPU)
    assert ops.rms_norm._active is not norms.rms_norm


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gems", r"no installed package offers it \(entry points lightserve.ops\); installed: absent, fake_norms,"),
        ("absent", "No module named 'no_such_package'"),
        (
            "outdated",
            r"op rms_norm is called with \(x, weight, eps\) in this version, and its .* takes \(x, weight\); in",
        ),
        ("misnamed", "test.fake_vendor.norms implements no op under the name misnamed"),
    ],
)
def test_an_unknown_backend_is_refused_with_those_that_are_installed(name: str, problem: str) -> None:
    with pytest.raises(ServerError, match=f"--ops_backend {name}: {problem}"):
        device_named("cpu").bind(CPU, ops_backends=[name])


def test_an_implementation_may_take_any_arguments_or_be_one_of_c() -> None:
    functions: dict[str, Callable[..., torch.Tensor]] = {"any": lambda *args: args[0], "of_c": torch.relu}
    for name, function in functions.items():
        ops.relu.impl(name)(function)

        assert ops.relu.impls.pop(name) is function


def test_quantised_weights_are_packed_by_the_backend_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor can be made there, so the layout has none."""
    npu, packed = torch.device("xpu", 3), ops.Int8Weight(codes=torch.empty(0), scales=torch.empty(0))
    asked: list[tuple[torch.Size, torch.device, int]] = []

    def pack(usual: ops.QuantizedWeight, device: torch.device, input_bits: int) -> ops.QuantizedWeight:
        asked.append((usual.codes.shape, device, input_bits))
        return packed

    monkeypatch.setitem(repack._LAYOUTS, "cpu", pack)
    ops.use_backend("cpu")
    linear = LinearSpec((LinearPart("q", 4, slice(0, 4)),), 64, slice(0, 64))
    for device in (npu, torch.device("meta")):
        weight = QuantizedLinear(linear, torch.float32, device, OnLoadFormat(OnLoadScheme("int8"))).weight
        assert (weight is packed) == (device is npu)
    assert asked == [((4, 64), npu, 8)]


def test_weights_have_the_layout_of_the_first_backend_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from test.fake_vendor.ops import BACKEND

    ops.use_backend("cpu", BACKEND)
    weight = ops.empty_weight((4, 6), torch.float32, CPU)
    assert (weight.shape, weight.stride()) == ((4, 6), (1, 4))
    assert ops.empty_weight((2, 4, 6), torch.float32, CPU).stride() == (24, 1, 4)
    assert ops.empty_weight((4, 6), torch.float32, torch.device("meta")).is_contiguous()

    monkeypatch.setitem(repack._ALLOCATIONS, "cpu", lambda shape, dtype, device: torch.empty(shape, dtype=dtype))
    assert ops.empty_weight((4, 6), torch.float32, CPU).is_contiguous()
