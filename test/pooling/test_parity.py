"""Embeddings and scores against transformers, on tiny random models with noise in every parameter.

LIGHTSERVE_TEST_DEVICE=cuda runs them on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from lightserve.common import ops
from lightserve.offline.llm import LLM
from test.pooling.files import CLS, SEP, VOCAB_SIZE, add_sentence_transformers, new_model, save

DEVICE = os.environ.get("LIGHTSERVE_TEST_DEVICE", "cpu")  # cuda: products are rounded to TF32
ON: dict[str, Any] = {"device": DEVICE, "data_type": "float32"}
TOLERANCE = 1e-4 if DEVICE == "cpu" else 5e-3
LENGTHS = (1, 2, 7, 33, 90)
KV = {"num_key_value_heads": 2}
ENCODERS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"type_vocab_size": 2}),
    ("roberta", {"type_vocab_size": 1}),
    ("xlm-roberta", {"type_vocab_size": 1}),
    ("nomic_bert", {"head_dim": 8}),
    ("modernbert", {"local_attention": 8, "norm_bias": False}),
]
DECODERS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {**KV, "head_dim": 16}, "last"),
    ("mistral", {**KV, "sliding_window": 16}, "mean"),
    ("llama", KV, "max"),
    ("qwen2", KV, "cls"),
    ("gemma2", {**KV, "head_dim": 16, "sliding_window": 16}, "last"),
    ("gemma3_text", {**KV, "head_dim": 16, "sliding_window": 16, "use_bidirectional_attention": True}, "mean"),
]


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, VOCAB_SIZE, length).tolist() for length in LENGTHS]


def hidden_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([ids])).last_hidden_state[0]
    return states


def pooled(states: torch.Tensor, kind: str) -> np.ndarray:
    vectors = {"last": states[-1], "cls": states[0], "mean": states.mean(0), "max": states.max(0).values}
    return vectors[kind].numpy()


def assert_parallel(found: np.ndarray, expected: np.ndarray) -> None:
    expected = expected / np.linalg.norm(expected)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert float(found @ expected) >= 0.9999


@pytest.mark.parametrize(("model_type", "fields"), ENCODERS, ids=[name for name, _ in ENCODERS])
def test_an_encoder_embeds_as_in_transformers(tmp_path: Path, model_type: str, fields: dict[str, Any]) -> None:
    model = new_model(AutoModel, model_type, **fields)
    llm = LLM(str(save(model, tmp_path)), **ON)

    found = llm.embed(prompts())

    for vector, ids in zip(found, prompts(), strict=True):
        assert_parallel(vector, pooled(hidden_of(model, ids), "mean"))


@pytest.mark.parametrize(("model_type", "fields", "pooling"), DECODERS, ids=[name for name, _, _ in DECODERS])
def test_a_decoder_embeds_as_in_transformers(
    tmp_path: Path, model_type: str, fields: dict[str, Any], pooling: str
) -> None:
    model = new_model(AutoModel, model_type, **fields)
    folder = str(save(model, tmp_path))

    whole = LLM(folder, **ON, task="embed", pooling=pooling).embed(prompts())
    in_chunks = LLM(folder, **ON, task="embed", pooling=pooling, batch_max_tokens=8).embed(prompts())

    for vector, chunked, ids in zip(whole, in_chunks, prompts(), strict=True):
        expected = pooled(hidden_of(model, ids), pooling)
        assert_parallel(vector, expected)
        assert_parallel(chunked, expected)


def test_a_decoder_that_sees_all_tokens_embeds_so(tmp_path: Path) -> None:
    """As gte-Qwen2: its config.json says is_causal false."""
    model = new_model(AutoModel, "qwen2", **KV)
    llm = LLM(str(save(model, tmp_path, is_causal=False)), **ON)
    mask = torch.zeros(1, 1, 33, 33)

    (found,) = llm.embed([prompts()[3]])

    with torch.inference_mode():
        states = model(torch.tensor([prompts()[3]]), attention_mask=mask).last_hidden_state[0]
    assert_parallel(found, states[-1].numpy())


def test_a_causal_language_model_embeds_where_asked(tmp_path: Path) -> None:
    model = new_model(AutoModelForCausalLM, "llama", **KV)
    llm = LLM(str(save(model, tmp_path)), **ON, task="embed")

    (found,) = llm.embed([prompts()[2]])

    assert_parallel(found, pooled(hidden_of(model.model, prompts()[2]), "last"))


def test_dense_layers_and_prompts_of_sentence_transformers_are_applied(tmp_path: Path) -> None:
    model = new_model(AutoModel, "bert", type_vocab_size=2)
    save(model, tmp_path)
    add_sentence_transformers(tmp_path, "pooling_mode_mean_tokens", {"query": "w9 w8 "}, dense=(48, 20))
    dense = load_file(tmp_path / "2_Dense" / "model.safetensors")
    llm = LLM(str(tmp_path), **ON)

    (found,) = llm.embed("w7", prompt_name="query")

    mean = hidden_of(model, [CLS, 9, 8, 7, SEP]).mean(0)
    assert_parallel(found, torch.tanh(dense["linear.weight"] @ mean + dense["linear.bias"]).numpy())


CLASSIFIERS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"type_vocab_size": 2}),
    ("roberta", {"type_vocab_size": 1}),
    ("modernbert", {"local_attention": 8, "classifier_pooling": "mean", "classifier_bias": True}),
    ("qwen3", {**KV, "head_dim": 16}),
    ("llama", KV),
]


@pytest.mark.parametrize(("model_type", "fields"), CLASSIFIERS, ids=[name for name, _ in CLASSIFIERS])
def test_a_classifier_scores_as_in_transformers(tmp_path: Path, model_type: str, fields: dict[str, Any]) -> None:
    model = new_model(AutoModelForSequenceClassification, model_type, num_labels=3, **fields)
    llm = LLM(str(save(model, tmp_path)), **ON)

    found = llm.classify(prompts())

    for shares, ids in zip(found, prompts(), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        np.testing.assert_allclose(shares, logits.softmax(-1).numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta"])
def test_a_cross_encoder_scores_a_pair_as_in_transformers(tmp_path: Path, model_type: str) -> None:
    types = 2 if model_type == "bert" else 1
    model = new_model(AutoModelForSequenceClassification, model_type, num_labels=1, type_vocab_size=types)
    llm = LLM(str(save(model, tmp_path)), **ON)

    found = llm.score("w5 w6", ["w7", "w8 w9 w10"])

    for score, document in zip(found, ([7], [8, 9, 10]), strict=True):
        ids = [CLS, 5, 6, SEP, *document, SEP]
        kinds = [0] * 4 + [types - 1] * (len(document) + 1)
        with torch.inference_mode():
            logit = model(torch.tensor([ids]), token_type_ids=torch.tensor([kinds])).logits[0, 0]
        assert score == pytest.approx(logit.sigmoid().item(), abs=TOLERANCE)


def test_a_reranker_scores_by_the_logits_of_yes_and_no(tmp_path: Path) -> None:
    model = new_model(AutoModelForCausalLM, "qwen3", **KV, head_dim=16, max_position_embeddings=256)
    llm = LLM(str(save(model, tmp_path)), **ON, task="score")

    (found,) = llm.score("w5 w6", ["w7"])

    ids = llm._texts.encode_pair("w5 w6", "w7")
    with torch.inference_mode():
        no, yes = model(torch.tensor([ids])).logits[0, -1, [VOCAB_SIZE - 2, VOCAB_SIZE - 1]]
    assert found == pytest.approx(torch.sigmoid(yes - no).item(), abs=TOLERANCE)


def test_a_reranker_scores_by_the_logit_of_one_token_of_a_template(tmp_path: Path) -> None:
    """As bge-reranker-v2-gemma: the tokenizer's own special tokens are around the prompt."""
    model = new_model(AutoModelForCausalLM, "gemma", **KV, head_dim=16)
    folder = save(model, tmp_path, classifier_from_token=["yes"])
    llm = LLM(str(folder), **ON, score_template="{{ query }} w20 {{ document }} w21")

    found = llm.score("w5 w6", ["w7", "w8 w9"])

    for score, document in zip(found, ([7], [8, 9]), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[CLS, 5, 6, 20, *document, 21, SEP]])).logits[0, -1]
        assert score == pytest.approx(torch.sigmoid(logits[VOCAB_SIZE - 1]).item(), abs=TOLERANCE)


def test_a_classification_head_scores_a_template(tmp_path: Path) -> None:
    """As nemotron-rerank."""
    model = new_model(AutoModelForSequenceClassification, "llama", num_labels=1, **KV)
    llm = LLM(str(save(model, tmp_path)), **ON, score_template="w30 {{ query }} w31 {{ document }}")

    (found,) = llm.score("w5 w6", ["w7"])

    with torch.inference_mode():
        logit = model(torch.tensor([[CLS, 30, 5, 6, 31, 7, SEP]])).logits[0, 0]
    assert found == pytest.approx(logit.sigmoid().item(), abs=TOLERANCE)


def test_a_reward_model_of_two_linears_scores_as_its_formula(tmp_path: Path) -> None:
    """Qwen2ForRewardModel is code of its own: Linear, ReLU, Linear on the last token."""
    from safetensors.torch import save_file

    model = new_model(AutoModelForCausalLM, "qwen2", **KV)
    save(model, tmp_path, architectures=["Qwen2ForRewardModel"])
    head = {"score.0": (48, 48), "score.2": (1, 48)}
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in head.items()}
    tensors |= {f"{name}.bias": torch.randn(shape[0]) for name, shape in head.items()}
    save_file(load_file(tmp_path / "model.safetensors") | tensors, tmp_path / "model.safetensors")
    llm = LLM(str(tmp_path), **ON)

    (found,) = llm.reward([prompts()[3]])

    last = hidden_of(model.model, prompts()[3])[-1]
    first = torch.relu(tensors["score.0.weight"] @ last + tensors["score.0.bias"])
    assert found == pytest.approx(
        (tensors["score.2.weight"] @ first + tensors["score.2.bias"]).item(), abs=10 * TOLERANCE
    )


@pytest.fixture
def _restored_backend() -> Iterator[None]:
    yield
    ops.use_backend(ops.REFERENCE)


@pytest.mark.slow
@pytest.mark.usefixtures("_restored_backend")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run in the interpreter")
@pytest.mark.parametrize(("model_type", "fields"), [ENCODERS[0], ENCODERS[4]], ids=["bert", "modernbert"])
def test_an_encoder_embeds_the_same_by_the_triton_kernels(
    tmp_path: Path, model_type: str, fields: dict[str, Any]
) -> None:
    model = new_model(AutoModel, model_type, **fields)
    llm = LLM(str(save(model, tmp_path)), **ON)
    import_module("lightserve.common.triton_kernel")
    ops.use_backend("triton")

    found = llm.embed(prompts()[:4])

    for vector, ids in zip(found, prompts(), strict=False):
        assert_parallel(vector, pooled(hidden_of(model, ids), "mean"))
