"""DeepSeek V3.2 and GLM-5, whose layers choose the tokens that they attend to, as a worker runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightserve.common import ops, triton_kernel  # noqa: F401  registers its backend
from lightserve.common.basemodel import LogitRows, Parallel, RankGroup, TpPartBaseModel
from lightserve.errors import ModelFilesError
from lightserve.models.deepseek_v32 import infer_state
from lightserve.models.registry import get_model_class
from test.models.architectures.case import MAX_LEN, Tiny, build
from test.models.architectures.cases import CASES
from test.models.session import Session
from test.models.test_latent_models import (
    ON_GPU,
    PROMPTS,
    assert_same_bits_in_any_batch,
    assert_tokens_of_transformers,
)
from test.models.tiny import build_model, model_args
from test.small_text import small_backend

TOP_K = 40  # of the cases


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return build(CASES[request.param])


@pytest.fixture(scope="module")
def glm() -> Tiny:
    return build(CASES["glm_moe_dsa"])


@pytest.fixture(scope="module")
def folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("sparse")
    tiny.hf.save_pretrained(path)
    small_backend().save(str(path / "tokenizer.json"))
    return str(path)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_chunks_batches_and_cached_prefixes_give_the_tokens_of_transformers(
    folder: str, tiny: Tiny, device: str
) -> None:
    assert_tokens_of_transformers(folder, tiny, device)


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", "float32"), pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu)]
)
def test_deterministic_requests_have_the_same_bits_in_any_batch_and_chunks(
    folder: str, device: str, dtype: str
) -> None:
    assert_same_bits_in_any_batch(folder, device, dtype)


def model_of(tiny: Tiny, *, max_len: int = MAX_LEN, **changes: Any) -> TpPartBaseModel:
    return build_model({**tiny.config_json, **changes}, tiny.checkpoint(), max_len=max_len)


def test_only_layers_that_choose_tokens_store_keys_for_it(glm: Tiny) -> None:
    layout = model_of(glm).kv_layout

    assert [(group.layers, group.token_shape) for group in layout.groups] == [
        ((0, 1, 2, 3), (1, 20 + 8)),
        ((0, 2), (1, 12)),
    ]


def test_a_warm_up_runs_layers_that_choose_and_layers_that_share(glm: Tiny) -> None:
    model = model_of(glm)

    with model.distinct_layers_only():
        assert [layer.layer_num for layer in model.layers_infer] == [0, 3, 2]


def test_a_server_of_short_requests_is_dense_and_stores_no_keys(tiny: Tiny) -> None:
    ids = PROMPTS[1][:TOP_K]
    short, long = model_of(tiny, max_len=TOP_K), model_of(tiny)

    ours, theirs = (Session(model).step({0: ids}, logit_rows=LogitRows.ALL) for model in (short, long))

    assert len(short.kv_layout.groups) == 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_many_rows_are_attended_to_in_several_launches(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Session(model_of(tiny)).step({0: PROMPTS[0]}, logit_rows=LogitRows.ALL)
    monkeypatch.setattr(infer_state, "MAX_ROWS", 7)

    logits = Session(model_of(tiny)).step({0: PROMPTS[0]}, logit_rows=LogitRows.ALL)

    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_the_layer_that_predicts_several_tokens_is_left_out(tiny: Tiny, log: pytest.LogCaptureFixture) -> None:
    number = tiny.config_json["num_hidden_layers"]
    own = {name.removeprefix("model.layers.2."): tensor for name, tensor in tiny.tensors.items() if ".2." in name}
    extra = {f"model.layers.{number}.{name}": tensor for name, tensor in own.items()}

    model_of(replace(tiny, tensors=tiny.tensors | extra))

    assert "the checkpoint has tensors that are not used" in log.text


@pytest.mark.parametrize(
    "fields",
    [
        {"indexer_types": ["full"]},
        {"indexer_types": ["full", "shared", "other", "full"]},
        {"indexer_types": ["shared", "full", "full", "full"]},
        {"indexer_types": None, "index_topk_pattern": "FSX"},
        {"indexer_types": None, "index_topk_pattern": 4},
    ],
)
def test_a_list_of_indexers_that_does_not_fit_is_refused(glm: Tiny, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelFilesError, match=r"wanted a list of 4 times 'full' or 'shared' that begins with 'full'"):
        model_of(glm, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index_head_dim": 6}, "index_head_dim 6 is less than qk_rope_head_dim 8"),
        ({"q_lora_rank": "many"}, "q_lora_rank"),
        ({"index_topk": -1}, "index_topk"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tiny: Tiny, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        model_of(tiny, **fields)


def test_a_pattern_of_letters_means_the_list(glm: Tiny) -> None:
    expected = Session(model_of(glm)).step({0: PROMPTS[0]})

    logits = Session(model_of(glm, indexer_types=None, index_topk_pattern="FSFS")).step({0: PROMPTS[0]})

    assert torch.equal(logits, expected)


def test_a_stage_that_begins_with_a_shared_choice_is_refused(glm: Tiny) -> None:
    config = {**glm.config_json, "indexer_types": ["full", "full", "shared", "shared"]}
    args = model_args(config, glm.checkpoint(), RankGroup())
    stage = replace(args, parallel=Parallel(pp=RankGroup(1, 2)), max_req_total_len=MAX_LEN)

    with pytest.raises(ModelFilesError, match=r"a pipeline stage begins with layer 2, .* use another --pp"):
        get_model_class("glm_moe_dsa")(stage)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="test_architectures.py runs the kernels there")
def test_kernels_in_the_interpreter_give_the_logits_of_the_definitions() -> None:
    case = CASES["glm_moe_dsa"]
    fields = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"], "index_topk": 8}
    tiny = build(replace(case, fields={**case.fields, **fields}))

    def logits(backend: str) -> torch.Tensor:
        ops.use_backend(backend)
        session = Session(model_of(tiny))
        session.step({0: PROMPTS[0][:6]})
        return torch.cat([session.step({0: PROMPTS[0][6:11], 1: [9]}), session.step({0: [7], 1: [8]})])

    try:
        ours, theirs = logits("triton"), logits(ops.REFERENCE)
    finally:
        ops.use_backend(ops.REFERENCE)

    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
