"""A norm and the linear behind it are one op in a plain layer, and two with an observer or an overridden hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common import basemodel as bm, ops
from lightserve.common.basemodel.hooks import recorded
from test.models.architectures.case import build
from test.models.architectures.llama_like import CASES
from test.models.session import Session
from test.models.tiny import build_hf, build_model, build_ours

PROMPT = [5, 17, 3, 99, 42]
FUSED = ("add_rms_norm_linear", "add_rms_norm_gate_up")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused ops that were called; add_rms_norm_gate_up calls add_rms_norm_linear."""
    names: list[str] = []

    def counting(name: str) -> Any:
        def call(*args: Any) -> Any:
            names.append(name)
            return ops.OPS[name].impls[ops.REFERENCE](*args)

        return call

    for name in FUSED:
        monkeypatch.setattr(ops.OPS[name], "_active", counting(name))
    return names


def logits_of(model: bm.TpPartBaseModel) -> Tensor:
    return Session(model).step({0: PROMPT})


@pytest.mark.parametrize(
    ("name", "linear", "gate_up"), [("llama-gqa", 3, 2), ("qwen2-tied", 3, 2), ("qwen3", 3, 2), ("bloom-8-heads", 0, 0)]
)
def test_plain_layers_compute_norm_and_linear_in_one_op(name: str, linear: int, gate_up: int, calls: list[str]) -> None:
    logits_of(build_ours(build_hf(name)))

    assert (calls.count(FUSED[0]), calls.count(FUSED[1])) == (linear, gate_up)


def test_an_observer_receives_the_norms_too(calls: list[str]) -> None:
    model = build_ours(build_hf("llama-gqa"))
    plain = logits_of(model)
    calls.clear()

    with recorded(model) as values:
        observed = logits_of(model)

    assert calls == []
    assert {"layers.1.att_norm", "layers.1.ffn_norm", "layers.1.ffn"} <= values.keys()
    torch.testing.assert_close(observed, plain)


def test_the_norms_inside_the_halves_are_computed_with_an_observer_too() -> None:
    tiny = build(CASES["bitnet"])
    model = build_model(tiny.config_json, tiny.checkpoint())
    plain = logits_of(model)

    with recorded(model):
        torch.testing.assert_close(logits_of(model), plain)


@pytest.mark.parametrize("hook", ["_att_norm", "_get_qkv", "_ffn_norm", "_ffn"])
def test_a_hook_that_a_subclass_overrides_runs_in_every_layer(hook: str) -> None:
    model = build_ours(build_hf("llama-gqa"))
    plain = logits_of(model)
    layers: list[int] = []

    def noting(self: Any, *args: Any) -> Any:
        layers.append(self.layer_num)
        return getattr(super(layer_class, self), hook)(*args)

    layer_class = type("Noting", (bm.DecoderLayerInferTpl,), {hook: noting})
    model.layers_infer = [layer_class(spec, model.tp) for spec in model.layer_specs]

    assert torch.equal(logits_of(model), plain)
    assert layers == [0, 1]


class NormOfOnePlus(bm.NormWeight):
    """The checkpoint holds the weight minus one."""

    def __init__(self, norm: bm.RmsNormWeight) -> None:
        self.tensor, self.eps = norm.tensor - 1, norm.eps

    def pieces(self) -> Iterator[bm.Piece]:
        yield from ()

    def norm(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.tensor + 1, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        return ops.add_rms_norm(x, residual, self.tensor + 1, self.eps)


class HalvedLinear(bm.LinearMethod):
    """Stores half of the weight; offers no fused op."""

    def __init__(self, method: bm.UnquantizedLinear) -> None:
        self.half = method.weight / 2

    def pieces(self) -> Iterator[bm.Piece]:
        yield from ()

    def mm(self, x: Tensor) -> Tensor:
        return 2 * ops.linear(x, self.half)


def use_norm_of_one_plus(layer: Any) -> None:
    layer.att_norm, layer.ffn_norm = NormOfOnePlus(layer.att_norm), NormOfOnePlus(layer.ffn_norm)


def use_halved_linear(layer: Any) -> None:
    for weight in (layer.qkv_proj, layer.ffn.gate_up_proj):
        weight.method = HalvedLinear(weight.method)


@pytest.mark.parametrize("change", [use_norm_of_one_plus, use_halved_linear])
def test_a_norm_or_linear_that_offers_no_fused_op_computes_its_own_way(
    change: Callable[[Any], None], calls: list[str]
) -> None:
    model = build_ours(build_hf("llama-gqa"))
    plain = logits_of(model)
    for weights in model.layer_weights:
        change(weights)
    calls.clear()

    changed = logits_of(model)

    assert calls == []
    torch.testing.assert_close(changed, plain)
