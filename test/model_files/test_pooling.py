"""The task of a model and its pooling, from config.json, sentence-transformers' files and flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightserve.errors import ModelFilesError
from lightserve.model_files.pooling import PoolingConfig, read_pooling
from lightserve.model_files.pooling.results import embedding, pair_score, probabilities

BERT = {"model_type": "bert", "hidden_size": 48, "architectures": ["BertModel"]}
LLAMA = {"model_type": "llama", "hidden_size": 48, "architectures": ["LlamaForCausalLM"]}
MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]


def of_class(hf: dict[str, Any], name: str, **fields: Any) -> dict[str, Any]:
    return {**hf, "architectures": [name], **fields}


def write_modules(folder: Path, pooling: Any, modules: Any = MODULES) -> None:
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("hf", "task", "pooling"),
    [
        (BERT, "embed", "mean"),
        (of_class(BERT, "BertForMaskedLM"), "embed", "mean"),
        (of_class(BERT, "BertForSequenceClassification"), "classify", "cls"),
        (of_class({**BERT, "model_type": "roberta"}, "RobertaForSequenceClassification"), "classify", "cls"),
        (of_class(LLAMA, "LlamaForSequenceClassification", num_labels=1), "classify", "last"),
        (of_class({**LLAMA, "model_type": "qwen2"}, "Qwen2ForRewardModel"), "reward", "last"),
        (of_class({**LLAMA, "model_type": "internlm2"}, "InternLM2ForRewardModel"), "reward", "last"),
        (of_class({**LLAMA, "model_type": "mistral"}, "MistralModel"), "embed", "last"),
        ({**LLAMA, "classifier_from_token": ["no", "yes"]}, "score", "last"),
    ],
)
def test_the_task_follows_from_the_files(hf: dict[str, Any], task: str, pooling: str) -> None:
    config = read_pooling(hf, None)

    assert config is not None
    assert (config.task, config.pooling) == (task, pooling)


@pytest.mark.parametrize(
    ("name", "model_type"), [("LlamaForCausalLM", "llama"), ("GPT2LMHeadModel", "gpt2"), ("ChatGLMModel", "chatglm")]
)
def test_a_decoder_generates(name: str, model_type: str) -> None:
    assert read_pooling({"model_type": model_type, "hidden_size": 48, "architectures": [name]}, None) is None


def test_flags_take_precedence() -> None:
    forced = read_pooling(LLAMA, None, task="embed", pooling="mean")
    scored = read_pooling(LLAMA, None, task="score")

    assert forced is not None
    assert (forced.task, forced.pooling, forced.size) == ("embed", "mean", 48)
    assert scored is not None
    assert (scored.answers, scored.is_pair_scorer) == (("no", "yes"), True)


def test_labels_are_sorted_by_their_number() -> None:
    names = {str(i): f"label {i}" for i in (10, 2, 1)}
    config = read_pooling(of_class(BERT, "BertForSequenceClassification", id2label=names), None)

    assert config is not None
    assert config.labels == ("label 1", "label 2", "label 10")


def test_sentence_transformers_files_are_read(tmp_path: Path) -> None:
    write_modules(tmp_path, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    prompts = {"prompts": {"query": "q: "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))

    config = read_pooling(LLAMA, tmp_path)

    assert config is not None
    assert (config.task, config.pooling, config.max_len) == ("embed", "cls", 128)
    assert (config.prompts, config.default_prompt) == ({"query": "q: "}, "query")


@pytest.mark.parametrize(
    ("hf", "flags", "message"),
    [
        (BERT, {"task": "generate"}, "bert is an encoder"),
        (BERT, {"task": "score"}, "has no such head"),
        (LLAMA, {"task": "classify"}, "has no such head"),
        (LLAMA, {"task": "fly"}, "must be one of"),
        (LLAMA, {"pooling": "mean"}, "set --task embed"),
        (LLAMA, {"task": "score", "pooling": "mean"}, "at the last token"),
        ({**LLAMA, "is_causal": False}, {"task": "generate"}, "generates no text"),
        ({**LLAMA, "is_causal": 1}, {"task": "embed"}, "wanted true or false"),
        (of_class(LLAMA, "LlamaForSequenceClassification", num_labels=3), {"task": "score"}, "this one has 3"),
        (of_class(LLAMA, "LlamaForSequenceClassification", num_labels=-1), {}, "num_labels is -1"),
        (of_class(LLAMA, "LlamaForSequenceClassification", id2label={"a": "b"}), {}, "id2label"),
        (of_class(LLAMA, "LlamaForRewardModel"), {}, "supported: internlm2, qwen2"),
        ({**BERT, "hidden_size": "x"}, {}, "hidden_size is 'x'"),
        ({**LLAMA, "classifier_from_token": ["no", "yes", "so"]}, {}, "not a list of one or two tokens"),
        (LLAMA, {"task": "generate", "score_template": "zerank"}, "set --task score"),
        (LLAMA, {"task": "embed", "score_template": "zerank"}, "does not score pairs"),
    ],
)
def test_a_wrong_config_or_flag_is_refused_by_name(hf: dict[str, Any], flags: dict[str, str], message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        read_pooling(hf, None, **flags)


@pytest.mark.parametrize(
    ("pooling", "modules", "message"),
    [
        ({"pooling_mode_mean_sqrt_len_tokens": True}, MODULES, "pooling_mode_mean_sqrt_len_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, MODULES, "exactly one"),
        ({}, MODULES, "pooling none"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, MODULES, "include_prompt"),
        ({"pooling_mode_mean_tokens": True}, [*MODULES, ("3_CNN", "CNN")], "module CNN is not supported"),
        ({"pooling_mode_mean_tokens": True}, MODULES[:1], "no Pooling module"),
        ({"pooling_mode_mean_tokens": True}, [("../other", "Pooling")], "not inside the model's folder"),
        ({"pooling_mode_mean_tokens": True}, [*MODULES, ("3_Dense", "Dense")], "no such file"),
    ],
)
def test_wrong_files_of_sentence_transformers_are_refused_by_name(
    tmp_path: Path, pooling: Any, modules: Any, message: str
) -> None:
    write_modules(tmp_path, pooling, modules)

    with pytest.raises(ModelFilesError, match=message):
        read_pooling(BERT, tmp_path)


@pytest.mark.parametrize("text", ["", "{", "5", '{"a": 1}', "[5]", '[{"type": "x"}]', "[" * 100_000])
def test_a_damaged_list_of_modules_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)

    with pytest.raises(ModelFilesError, match=r"modules\.json"):
        read_pooling(BERT, tmp_path)


def test_a_dense_layer_must_fit_the_model(tmp_path: Path) -> None:
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True}, [*MODULES, ("3_Dense", "Dense")])
    (tmp_path / "3_Dense").mkdir()
    (tmp_path / "3_Dense" / "config.json").write_text('{"in_features": 7, "out_features": 9}')

    with pytest.raises(ModelFilesError, match="in_features is 7, but it receives 48"):
        read_pooling(BERT, tmp_path)


CROSS_ENCODER = of_class(BERT, "BertForSequenceClassification", num_labels=1)
IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("fields", "is_regression"),
    [
        ({}, False),
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, False),
        ({"sentence_transformers": {"version": "4.1.0"}}, False),
        ({"sbert_ce_default_activation_function": IDENTITY}, True),
        ({"problem_type": "regression"}, True),
        ({"num_labels": 3, "sentence_transformers": {"activation_fn": IDENTITY}}, False),
    ],
)
def test_a_cross_encoder_is_a_regression_if_its_files_say_so(fields: dict[str, Any], is_regression: bool) -> None:
    config = read_pooling({**CROSS_ENCODER, **fields}, None)

    assert config is not None
    assert config.is_regression == is_regression
    logits = np.array([2.5], dtype=np.float32)
    assert pair_score(config, logits) == pytest.approx(2.5 if is_regression else 1 / (1 + np.exp(-2.5)))
    assert pair_score(config, logits, is_raw=True) == 2.5


def test_an_unknown_activation_of_a_cross_encoder_is_refused_by_name() -> None:
    with pytest.raises(ModelFilesError, match="activation_fn 'Tanh' is not supported; supported: Identity, Sigmoid"):
        read_pooling({**CROSS_ENCODER, "sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, None)


def test_results_are_normalised_and_squashed() -> None:
    logits = np.array([1.0, 3.0], dtype=np.float32)
    labels = PoolingConfig("classify", "cls", 2)
    several = PoolingConfig("classify", "cls", 2, is_multi_label=True)
    answers = PoolingConfig("score", "last", 2, answers=("no", "yes"))

    assert embedding(np.array([3, 4], dtype=np.float32)).tolist() == pytest.approx([0.6, 0.8])
    assert embedding(np.zeros(2, dtype=np.float32)).tolist() == [0, 0]
    assert probabilities(labels, logits).sum() == pytest.approx(1)
    assert probabilities(several, logits).tolist() == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-3))])
    assert pair_score(answers, logits) == pytest.approx(probabilities(labels, logits)[1])
