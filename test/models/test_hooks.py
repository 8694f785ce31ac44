from __future__ import annotations

from typing import Any

import pytest
import torch

from lightserve.common.basemodel.hooks import hooks_of, recorded
from lightserve.errors import InvalidRequestError
from lightserve.tools.dump import compare, first_difference
from test.models.session import Session
from test.models.tiny import build_hf, build_ours

PROMPT = [5, 17, 3, 99, 42]


def test_a_callback_receives_its_intermediate_in_prefill_and_decode() -> None:
    model = build_ours(build_hf("llama-gqa"))
    seen: list[tuple[str, tuple[int, ...]]] = []
    hooks = hooks_of(model)
    hooks.register("layers.*.ffn", lambda name, value: seen.append((name, tuple(value.shape))))
    hooks.register("logits", lambda name, value: seen.append((name, tuple(value.shape))))
    session = Session(model)

    session.step({0: PROMPT})
    session.step({0: [9]})

    prefill = [("layers.0.ffn", (5, 64)), ("layers.1.ffn", (5, 64)), ("logits", (1, 131))]
    assert seen == [*prefill, ("layers.0.ffn", (1, 64)), ("layers.1.ffn", (1, 64)), ("logits", (1, 131))]


def test_a_model_without_callbacks_has_no_observer() -> None:
    model = build_ours(build_hf("llama-gqa"))
    remove = hooks_of(model).register("*", lambda name, value: pytest.fail("called after it was removed"))

    remove()

    assert model.observer is None
    Session(model).step({0: PROMPT})


def test_removing_a_callback_leaves_the_others() -> None:
    model = build_ours(build_hf("llama-gqa"))
    seen: list[str] = []
    remove_first = hooks_of(model).register("logits", lambda name, value: seen.append("first"))
    session = Session(model)

    with recorded(model, "layers.0.ffn") as values:
        remove_second = hooks_of(model).register("logits", lambda name, value: seen.append("second"))
        session.step({0: PROMPT})
    remove_first()
    session.step({0: [9]})
    remove_second()
    session.step({0: [9]})

    assert list(values) == ["layers.0.ffn"]
    assert seen == ["first", "second", "second"]


def test_an_unknown_intermediate_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"layers\.9\.ffn"):
        hooks_of(build_ours(build_hf("llama-gqa"))).register("layers.9.ffn", print)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-tied", "bloom-12-heads"])
def test_recorded_layers_are_the_hidden_states_of_transformers(name: str) -> None:
    hf = build_hf(name)

    differences = compare(build_ours(hf), hf, PROMPT)

    assert [d.name for d in differences] == ["embedding", "layers.0", "logits"]
    assert first_difference(differences, 1e-4) is None


def test_the_comparison_names_the_first_layer_that_differs() -> None:
    hf = build_hf("llama-gqa")
    model = build_ours(hf)
    _break_second_norm(model)

    first = first_difference(compare(model, hf, PROMPT), 1e-4)

    assert first is not None
    assert first.name == "layers.0"


def _break_second_norm(model: Any) -> None:
    model.layer_weights[0].ffn_norm.tensor += 0.1


def test_recorded_values_are_copies() -> None:
    hf = build_hf("llama-gqa")
    model = build_ours(hf)

    with recorded(model, "embedding") as values:
        Session(model).step({0: PROMPT})

    torch.testing.assert_close(values["embedding"], hf.get_input_embeddings()(torch.tensor(PROMPT)).detach())
