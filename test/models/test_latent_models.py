"""Models with latent attention, as a worker runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightserve.common import ops, triton_kernel  # noqa: F401  registers its backend
from lightserve.common.basemodel import TpPartBaseModel
from lightserve.errors import ModelFilesError
from lightserve.messages.params import GenerationParams
from lightserve.offline.llm import LLM
from test.models.architectures.case import MAX_LEN, Tiny, build
from test.models.architectures.cases import CASES
from test.models.session import Session
from test.models.tiny import build_model
from test.small_text import small_backend

ON_GPU = torch.cuda.is_available()
GREEDY = GenerationParams.of(max_new_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
PROMPTS = [[(37 * i + i * i // 7 + seed) % 131 for i in range(length)] for seed, length in enumerate((150, 40, 7, 151))]


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return build(CASES["deepseek_v2"])


@pytest.fixture(scope="module")
def folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("deepseek")
    tiny.hf.save_pretrained(path)
    small_backend().save(str(path / "tokenizer.json"))
    return str(path)


def make(folder: str, device: str = "cpu", data_type: str = "float32", **options: Any) -> LLM:
    return LLM(folder, device=device, data_type=data_type, max_total_token_num=1000, **options)


def generated(hf: Any, ids: list[int]) -> list[int]:
    prompt = torch.tensor([ids])
    is_seen = torch.ones_like(prompt)  # without it, tokens of the id of padding are masked
    out = hf.generate(
        prompt, attention_mask=is_seen, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


def assert_tokens_of_transformers(folder: str, tiny: Tiny, device: str) -> None:
    expected = [generated(tiny.hf, ids) for ids in PROMPTS]
    whole, in_chunks = make(folder, device), make(folder, device, batch_max_tokens=16)

    alone = [whole.generate([ids], GREEDY)[0].token_ids for ids in PROMPTS]
    cached = [whole.generate([ids], GREEDY)[0].token_ids for ids in PROMPTS]
    chunked = [one.token_ids for one in in_chunks.generate(PROMPTS, GREEDY)]

    assert alone == expected
    assert cached == expected
    assert chunked == expected


def assert_same_bits_in_any_batch(folder: str, device: str, dtype: str) -> None:
    whole = make(folder, device, dtype, deterministic=True)
    in_chunks = make(folder, device, dtype, deterministic=True, batch_max_tokens=16)
    first = whole.generate([PROMPTS[0]], GREEDY)[0]

    cached = whole.generate([PROMPTS[0]], GREEDY)[0]
    among_others = in_chunks.generate(PROMPTS, GREEDY)[0]

    for again in (cached, among_others):
        assert again.token_ids == first.token_ids
        assert again.logprobs == first.logprobs


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


def model_of(tiny: Tiny, **changes: Any) -> TpPartBaseModel:
    return build_model({**tiny.config_json, **changes}, tiny.checkpoint(), max_len=MAX_LEN)


def test_a_warm_up_runs_a_dense_and_a_sparse_layer(tiny: Tiny) -> None:
    model = model_of(tiny)

    with model.distinct_layers_only():
        assert [layer.layer_num for layer in model.layers_infer] == [0, 2]


def test_the_layer_that_predicts_several_tokens_is_left_out(tiny: Tiny, log: pytest.LogCaptureFixture) -> None:
    number = tiny.config_json["num_hidden_layers"]
    own = {name.removeprefix("model.layers.2."): tensor for name, tensor in tiny.tensors.items() if ".2." in name}
    extra = {**own, "eh_proj.weight": torch.zeros(48, 96)}
    tensors = tiny.tensors | {f"model.layers.{number}.{name}": tensor for name, tensor in extra.items()}

    model = model_of(replace(tiny, tensors=tensors))

    assert len(model.layer_weights) == number
    assert "the checkpoint has tensors that are not used" in log.text


@pytest.mark.parametrize(
    ("model_type", "field", "value", "supported"),
    [
        ("deepseek_v2", "topk_method", "noaux_tc", "'greedy', 'group_limited_greedy'"),
        ("deepseek_v2", "scoring_func", "sigmoid", "softmax"),
        ("deepseek_v2", "norm_topk_prob", True, "False"),
        ("deepseek_v3", "topk_method", "greedy", "noaux_tc"),
        ("kimi_k2", "scoring_func", "softmax", "sigmoid"),
        ("mistral4", "scoring_func", "sigmoid", "softmax"),
    ],
)
def test_other_ways_to_choose_experts_are_refused(
    tiny: Tiny, model_type: str, field: str, value: object, supported: str
) -> None:
    with pytest.raises(ModelFilesError, match=f"{field} .*{value}.* not supported.*{supported}"):
        model_of(tiny, **{"model_type": model_type, field: value})


@pytest.mark.parametrize("kinds", [["sparse"], ["dense", "sparse", "other"], "sparse", [["dense"]] * 3])
def test_a_list_of_sparse_layers_that_does_not_fit_is_refused(kinds: object) -> None:
    with pytest.raises(ModelFilesError, match=r"mlp_layer_types is .*, wanted a list of 3 times 'dense' or 'sparse'"):
        model_of(build(CASES["glm4_moe_lite"]), mlp_layer_types=kinds)


def test_a_token_caches_one_latent_a_layer(tiny: Tiny) -> None:
    model = model_of(tiny)

    (group,) = model.kv_layout.groups
    assert group.token_shape == (1, 20 + 8)
    assert group.bytes_per_token == model.config.num_layers * (20 + 8) * 4


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_biases_are_refused(tiny: Tiny, field: str) -> None:
    with pytest.raises(ModelFilesError, match=f"{field} True is not supported for deepseek_v2; supported: False"):
        model_of(tiny, **{field: True})


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="test_architectures.py runs the kernels there")
def test_kernels_in_the_interpreter_give_the_logits_of_the_definitions(tiny: Tiny) -> None:
    def logits(backend: str) -> torch.Tensor:
        ops.use_backend(backend)
        session = Session(model_of(tiny))
        session.step({0: PROMPTS[1][:30], 1: PROMPTS[2]})
        return torch.cat([session.step({0: PROMPTS[1][30:], 1: [9]}), session.step({0: [7], 1: [8]})])

    try:
        ours, theirs = logits("triton"), logits(ops.REFERENCE)
    finally:
        ops.use_backend(ops.REFERENCE)

    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
