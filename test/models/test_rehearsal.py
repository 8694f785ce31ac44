from __future__ import annotations

import pytest
import torch

from lightserve.common.basemodel import RmsNormWeight, WeightContext
from lightserve.common.basemodel.hooks import hooks_of
from lightserve.common.parallel import Parallel
from test.models.session import Session
from test.models.tiny import build_hf, build_ours

PROMPT = [5, 17, 3, 99, 42]


def test_one_layer_of_each_kind_runs_inside_the_context_and_all_layers_after_it() -> None:
    model = build_ours(build_hf("llama-gqa"))
    seen: list[str] = []
    hooks_of(model).register("layers.*.ffn", lambda name, value: seen.append(name))
    session = Session(model)
    expected = session.step({0: PROMPT})
    everything = list(seen)

    with model.distinct_layers_only():
        session.step({1: PROMPT})
    reduced = seen[len(everything) :]
    again = session.step({2: PROMPT})

    assert len(everything) > 1
    assert len(reduced) == 1
    assert seen[len(everything) + 1 :] == everything
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_layers_with_other_weights_are_of_another_kind() -> None:
    model = build_ours(build_hf("llama-gqa"))
    context = WeightContext(Parallel(), torch.float32, model.device)
    first, second = model.layer_weights

    assert first.kernel_key() == second.kernel_key()
    second.k_norm = RmsNormWeight("k_norm", 16, 1e-5, context)  # type: ignore[attr-defined]

    assert first.kernel_key() != second.kernel_key()
    with model.distinct_layers_only():
        assert model.layer_weights == [first, second]


def test_an_error_inside_the_context_restores_all_layers() -> None:
    model = build_ours(build_hf("llama-gqa"))
    layers = model.layers_infer

    with pytest.raises(RuntimeError, match="no memory"), model.distinct_layers_only():
        raise RuntimeError("no memory")

    assert model.layers_infer is layers
