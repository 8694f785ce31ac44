"""Keys with large biases in a KV cache of 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common.basemodel.layer_weights import decoder
from lightserve.common.basemodel.layer_weights.key_scaling import KeyLayout, key_factors, scale_keys
from lightserve.common.quantization import LinearMethod, LinearPart, LinearSpec
from lightserve.common.quantization.on_load import OnLoadFormat
from lightserve.common.quantization.quantize import quantize
from lightserve.common.quantization.quantized_linear import QuantizedLinear, StackedLinear
from lightserve.common.quantization.unquantized import UnquantizedLinear
from lightserve.model_files.quantization.on_load import OnLoadScheme
from test.models.session import Session
from test.models.tiny import build_hf, build_with_kv

LAYOUT = KeyLayout(num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=6)
IN_SIZE = 16
PROMPT = [5, 17, 3, 99, 42, 8, 1, 64, 20, 7]


def new_linear(*sizes: int) -> UnquantizedLinear:
    parts = tuple(LinearPart(name, size, slice(0, size)) for name, size in zip("qkv", sizes, strict=False))
    spec = LinearSpec(parts, IN_SIZE, slice(0, IN_SIZE), has_bias=True)
    torch.manual_seed(0)
    linear = UnquantizedLinear(spec, torch.float32, torch.device("cpu"))
    torch.nn.init.normal_(linear.weight)
    assert linear.bias is not None
    torch.nn.init.normal_(linear.bias)
    return linear


def with_large_biases(linear: UnquantizedLinear, at: int, size: float = 300.0) -> None:
    assert linear.bias is not None
    linear.bias[at], linear.bias[at + 9] = size, -40.0


def stacked() -> StackedLinear:
    q, kv = new_linear(32), new_linear(16, 16)
    with_large_biases(kv, 1)
    return StackedLinear([q, kv])


def fused(size: float = 300.0) -> UnquantizedLinear:
    linear = new_linear(32, 16, 16)
    with_large_biases(linear, 33, size)
    return linear


def rotated(x: Tensor, angle: float) -> Tensor:
    """The first ``rotary_dim`` numbers of heads, in halves."""
    half = LAYOUT.rotary_dim // 2
    angles = angle * torch.arange(1, half + 1)
    left, right = x[..., :half], x[..., half : 2 * half]
    turned = left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()
    return torch.cat([*turned, x[..., 2 * half :]], dim=-1)


def scores(linear: LinearMethod, rounded: Callable[[Tensor], Tensor] = lambda keys: keys) -> Tensor:
    x = torch.randn(3, IN_SIZE, generator=torch.Generator().manual_seed(1))
    heads = linear.mm(x).view(3, -1, LAYOUT.head_dim)
    q, k = heads[:, :4], heads[:, 4:6]
    keys = rounded(rotated(k, 0.3)).repeat_interleave(2, dim=1)
    return torch.einsum("ihd,jhd->hij", rotated(q, 0.7), keys)


@pytest.mark.parametrize("linear", [fused, stacked])
def test_products_of_rotated_queries_and_keys_stay_the_same(linear: Any) -> None:
    method = linear()
    before, bias = scores(method), method.bias_of_rows().clone()

    scale_keys(method, LAYOUT)

    changed = method.bias_of_rows() / bias
    assert changed[33] == changed[36] <= 1 / 8  # the two that rotate together
    assert (changed[32 + 16 :] == 1).all()  # values
    torch.testing.assert_close(scores(method), before, rtol=1e-4, atol=1e-2)


def test_keys_without_large_biases_are_left_alone() -> None:
    assert (key_factors(torch.randn(2, 8, generator=torch.Generator().manual_seed(0)), 8) == 1).all()


@pytest.mark.parametrize("kind", ["int8", "w4"])
def test_rows_of_a_quantised_weight_are_scaled_exactly(kind: str) -> None:
    spec = LinearSpec((LinearPart("q", 4, slice(0, 4)),), 64, slice(0, 64), has_bias=True, scales_rows=True)
    method = QuantizedLinear(spec, torch.float32, torch.device("cpu"), OnLoadFormat(OnLoadScheme(kind)))
    method.restore_weights_before_loading()
    method.weight.copy_(quantize(torch.randn(4, 64), type(method.weight), 32 if kind == "w4" else None))
    factors = torch.tensor([1.0, 4.0, 0.25, 1.0])
    expected = method.weight.dequantize() * factors[:, None]

    method.scale_rows(factors)

    assert torch.equal(method.weight.dequantize(), expected)


def in_int8(keys: Tensor) -> Tensor:
    scales = keys.abs().amax(-1, keepdim=True) / 127
    return (keys / scales).round() * scales


def in_fp8(keys: Tensor) -> Tensor:
    return keys.clamp(-448, 448).to(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("rounded", [in_int8, in_fp8])
def test_rounded_keys_give_better_products(rounded: Callable[[Tensor], Tensor]) -> None:
    method = fused(600.0)
    exact = scores(method)
    error = (scores(method, rounded) - exact).norm()

    scale_keys(method, LAYOUT)

    assert (scores(method, rounded) - exact).norm() < error / 2


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_model_scales_the_keys_of_a_quantised_cache(kv_dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled: list[KeyLayout] = []

    def record(method: LinearMethod, layout: KeyLayout, lora: object = None) -> float:
        scaled.append(layout)
        return 1.0

    monkeypatch.setattr(decoder, "scale_keys", record)

    build_with_kv(build_hf("qwen2-one-kv-head"), kv_dtype)
    build_with_kv(build_hf("llama-gqa"), kv_dtype)  # has no biases

    assert [layout.num_kv_heads for layout in scaled] == ([] if kv_dtype is None else [1, 1])


@pytest.mark.parametrize(("kv_dtype", "is_warned"), [("fp8", True), ("int8", False)])
def test_a_warning_says_that_large_keys_suffer_in_fp8(
    kv_dtype: str, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    build_with_kv(with_large_key(), kv_dtype)
    build_with_kv(build_hf("qwen2-tied"), "fp8")

    warnings = [record.getMessage() for record in caplog.records if "large biases" in record.getMessage()]
    assert len(warnings) == is_warned
    assert all("(layer 0)" in warning and "--kv_dtype int8" in warning for warning in warnings)


def with_large_key() -> Any:
    hf = build_hf("qwen2-tied")
    with torch.no_grad():
        hf.model.layers[0].self_attn.k_proj.bias[3] = 600.0
    return hf


def test_a_model_with_a_large_bias_keeps_its_logits() -> None:
    hf = with_large_key()

    found, expected = logits_of(hf, "int8"), logits_of(hf, None)

    assert (found - expected).abs().max() < 0.03 * expected.abs().max()


def logits_of(hf: Any, kv_dtype: str | None) -> Tensor:
    session = Session(build_with_kv(hf, kv_dtype))
    return torch.cat([session.step({0: PROMPT[:6]}), session.step({0: PROMPT[6:]}), session.step({0: [7]})])
