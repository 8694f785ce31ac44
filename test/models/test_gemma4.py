"""What of Gemma 4 the logits of ``test_architectures.py`` do not show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common import (
    cpu_kernel,  # noqa: F401  registers its backend
    ops,
    triton_kernel,  # noqa: F401  registers its backend
)
from lightserve.common.basemodel import CheckpointTensor, Parallel, RankGroup, TpPartBaseModel
from lightserve.common.device.profile import H200
from lightserve.common.triton_kernel import _gpu
from lightserve.errors import ModelFilesError, ServerError
from lightserve.model_files.pooling import read_pooling
from lightserve.models.registry import get_model_class
from test.models.architectures.case import MAX_LEN, Tiny, build, hf_logits
from test.models.architectures.gemma4 import CASES
from test.models.session import Session
from test.models.tiny import ONE_RANK, build_model, model_args

ON_GPU = torch.cuda.is_available()
PROMPT = [(37 * i + 5) % 131 for i in range(40)]  # longer than the window
KV_ERRORS = {"fp8": 0.12, "int8": 0.03}  # of the largest logit, as in test_kv_dtype.py


@pytest.fixture(autouse=True)
def _backend() -> Iterator[None]:
    ops.use_backend("cpu")
    yield
    ops.use_backend(ops.REFERENCE)


@pytest.fixture(scope="module")
def shared() -> Tiny:
    return build(CASES["gemma4_text"])


def model_of(tiny: Tiny, **changes: Any) -> TpPartBaseModel:
    return build_model({**tiny.config_json, **changes}, tiny.checkpoint(), max_len=MAX_LEN)


def logits_of(model: TpPartBaseModel) -> Tensor:
    """Of a prompt in chunks, and of a decode step."""
    session = Session(model)
    return torch.cat([session.step({0: PROMPT[:30]}), session.step({0: PROMPT[30:]}), session.step({0: [7]})])


def test_only_layers_with_keys_and_values_take_kv_memory(shared: Tiny) -> None:
    model = model_of(shared)

    assert [buffer.shape[0] for buffer in model.mem_manager.buffers] == [2, 1]
    assert model.kv_layout.readers == ((3, 1), (4, 1), (5, 2))
    assert model.kv_layout.bytes_per_token == 4 * 2 * 2 * (2 * 16 + 24)  # float32, keys and values, 2 KV heads


def test_a_warm_up_runs_layers_with_and_without_keys_and_values(shared: Tiny) -> None:
    model = model_of(shared)
    session = Session(model)

    with model.distinct_layers_only():
        assert [layer.layer_num for layer in model.layers_infer] == [1, 2, 4, 5]
        session.step({0: PROMPT})
        session.step({0: [7]})


@pytest.mark.parametrize("kv_dtype", KV_ERRORS)
def test_a_quantised_cache_is_read_by_the_layers_that_share_it(shared: Tiny, kv_dtype: str) -> None:
    """Also with the scales that a checkpoint has for it."""
    scale = CheckpointTensor("model.layers.2.self_attn.k_scale", torch.tensor(0.25), "memory")
    args = model_args(shared.config_json, [*shared.checkpoint(), scale], ONE_RANK)
    args = replace(args, kv_dtype=kv_dtype, max_req_total_len=MAX_LEN)
    expected = logits_of(model_of(shared))

    found = logits_of(get_model_class("gemma4_text")(args))

    assert 0 < (found - expected).abs().max() <= KV_ERRORS[kv_dtype] * expected.abs().max()


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="test_architectures.py runs the kernels there")
def test_kernels_in_the_interpreter_give_the_logits_of_transformers(
    shared: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gpu, "active", replace(H200, multiprocessors=12))  # programs run one after the other
    session = Session(model_of(shared))
    ops.use_backend("triton")

    found = torch.cat([session.step(step) for step in ({0: PROMPT[:25]}, {0: PROMPT[25:28]}, {0: [7]})])

    expected = hf_logits(shared.hf, [*PROMPT[:28], 7])[[24, 27, 28]]
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_published_files_and_those_of_transformers_have_the_same_shapes(shared: Tiny) -> None:
    published = build(CASES["gemma4_text-published"])

    specs = [model_of(tiny).layer_specs for tiny in (shared, published)]

    assert [[replace(spec, config=None) for spec in one] for one in specs] == [  # type: ignore[arg-type]
        [replace(spec, config=None) for spec in specs[0]]  # type: ignore[arg-type]
    ] * 2
    assert [spec.intermediate_size for spec in specs[0]] == [64, 64, 64, 128, 128, 128]
    assert [spec.head_dim for spec in specs[0]] == [16, 16, 24, 16, 16, 24]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("use_bidirectional_attention", "all", "'all' is not supported for gemma4_text"),
        ("num_kv_shared_layers", 4, "4 of 6 layers, which leaves no full_attention with keys and values for layer 2"),
        ("num_kv_shared_layers", 6, "leaves no sliding_attention"),
        ("num_kv_shared_layers", -1, "num_kv_shared_layers"),
        ("num_kv_shared_layers", "two", "num_kv_shared_layers"),
        ("vocab_size_per_layer_input", 100, "is 100; it must be at least 131"),
        ("per_layer_config", {"2": {"softcap": 3}}, r"per_layer_config has \{'softcap': 3\}.*supported: head_dim"),
        ("per_layer_config", {"2": {"head_dim": "wide"}}, "head_dim"),
        ("per_layer_config", {"2": {"head_dim": 25}}, "head_dim 25 is odd"),
        ("per_layer_config", [24], "per_layer_config"),
        ("hidden_activation", "mish", "gelu_pytorch_tanh"),
        ("rope_parameters", {"full_attention": {"rope_type": "spiral"}}, "proportional"),
    ],
)
def test_values_that_the_code_does_not_implement_are_refused(
    shared: Tiny, field: str, value: object, message: str
) -> None:
    with pytest.raises(ModelFilesError, match=message):
        model_of(shared, **{field: value})


def test_pipeline_stages_are_refused_if_layers_read_values_of_others(shared: Tiny) -> None:
    args = replace(model_args(shared.config_json, None, ONE_RANK), parallel=Parallel(pp=RankGroup(0, 2)))

    with pytest.raises(ServerError, match="pp=2 is not supported for gemma4_text with per-layer inputs or shared KV"):
        get_model_class("gemma4_text")(args)


def test_a_file_with_only_a_shape_has_the_layers_of_transformers() -> None:
    config = model_args({"model_type": "gemma4_text", "num_hidden_layers": 7}, None, ONE_RANK).config

    assert config.layer_types == ("sliding_attention",) * 5 + ("full_attention",) * 2
    assert config.head_dims == [256] * 5 + [512] * 2
    assert config.rope.rope_type == "proportional"


@pytest.mark.parametrize(("seen", "generates"), [("vision", True), (None, True), ("all", False)])
def test_only_a_model_whose_texts_are_causal_generates(seen: str | None, generates: bool) -> None:
    hf = {"model_type": "gemma4_text", "use_bidirectional_attention": seen}

    if generates:
        assert read_pooling(hf, None) is None
    else:
        with pytest.raises(ModelFilesError, match="the tokens of this model see later ones"):
            read_pooling(hf, None)
