"""RMSNorm with a gate, by the definition and by every backend."""

from __future__ import annotations

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from lightserve.common import ops
from test.ops.cases import EPS, TOLERANCE, assert_close, device_of, each_backend_and_dtype, randn, strided, wide

CLOSE = TOLERANCE[torch.float32]
NORMS = [ops.GatedNorm(), ops.GatedNorm("sigmoid"), ops.GatedNorm(gates_first=True)]


@pytest.mark.parametrize(
    ("module_class", "norm"),
    [(Qwen3NextRMSNormGated, ops.GatedNorm()), (KimiLinearRMSNormGated, ops.GatedNorm("sigmoid"))],
)
def test_a_gate_follows_the_norm_of_each_head(module_class: type[torch.nn.Module], norm: ops.GatedNorm) -> None:
    x, gate, weight = randn(5, 3, 16), randn(5, 3, 16, seed=1), randn(16, seed=2)
    module = module_class(16, eps=EPS)
    module.load_state_dict({"weight": weight})

    out = ops.gated_rms_norm(x, gate, weight, EPS, norm)

    torch.testing.assert_close(out, module(x, gate), **CLOSE)


def test_a_gate_comes_before_the_norm_of_each_group_in_nemotron() -> None:
    if not hasattr(modeling_nemotron_h, "NemotronHRMSNormGated"):
        pytest.skip("this version of transformers has no such class")
    x, gate, weight = randn(5, 48), randn(5, 48, seed=1), randn(48, seed=2)
    module = modeling_nemotron_h.NemotronHRMSNormGated(48, 16, eps=EPS)
    module.load_state_dict({"weight": weight})

    grouped, gates = (tensor.view(5, 3, 16) for tensor in (x, gate))
    out = ops.gated_rms_norm(grouped, gates, weight.view(3, 16), EPS, ops.GatedNorm(gates_first=True))

    torch.testing.assert_close(out.view(5, 48), module(x, gate), **CLOSE)


@each_backend_and_dtype(ops.gated_rms_norm)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("has_group_weights", [False, True])
def test_gated_rms_norm_matches_its_definition(
    backend: str, dtype: torch.dtype, norm: ops.GatedNorm, has_group_weights: bool
) -> None:
    x, gate = (strided(randn(5, 3, 20, dtype=dtype, device=device_of(backend), seed=seed)) for seed in (0, 1))
    weight = randn(*((3, 20) if has_group_weights else (20,)), dtype=dtype, device=device_of(backend), seed=2)

    out = ops.gated_rms_norm.impls[backend](x, gate, weight, EPS, norm)

    assert_close(out, ops.gated_rms_norm(wide(x), wide(gate), wide(weight), EPS, norm), dtype)
