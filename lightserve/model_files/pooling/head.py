"""The layers between a pooled vector and a result, and the heads that transformers' classes have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.errors import ModelFilesError

ACTIVATIONS = ("none", "tanh", "gelu", "relu", "silu", "sigmoid")


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A linear, then an activation, then a LayerNorm."""

    name: str  # of the linear's tensors in the checkpoint, without .weight and .bias
    in_size: int
    out_size: int
    has_bias: bool = True
    activation: str = "none"  # one of ACTIVATIONS
    norm: str | None = None  # of the norm's tensors; None: there is no norm
    norm_eps: float = 1e-5
    has_norm_bias: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """How a class of transformers turns hidden states into scores."""

    pooling: str
    layers: tuple[HeadLayer, ...]


def classification_head(hf: Mapping[str, Any], labels: int) -> Head:
    """The head of ``...ForSequenceClassification``."""
    hidden, kind = hidden_size(hf), str(hf.get("model_type"))
    if kind in ("bert", "nomic_bert"):
        pooler = HeadLayer("pooler.dense", hidden, hidden, activation="tanh")
        return Head("cls", (pooler, HeadLayer("classifier", hidden, labels)))
    if kind in ("roberta", "xlm-roberta", "camembert"):
        dense = HeadLayer("classifier.dense", hidden, hidden, activation="tanh")
        return Head("cls", (dense, HeadLayer("classifier.out_proj", hidden, labels)))
    if kind == "modernbert":
        return Head(_modernbert_pooling(hf), (_modernbert_dense(hf), HeadLayer("classifier", hidden, labels)))
    return Head("last", (HeadLayer("score", hidden, labels, has_bias=False),))


def reward_head(hf: Mapping[str, Any]) -> Head:
    """The head of ``...ForRewardModel``."""
    hidden, kind = hidden_size(hf), hf.get("model_type")
    if kind == "internlm2":
        return Head("last", (HeadLayer("v_head", hidden, 1, has_bias=False),))
    if kind == "qwen2":
        first = HeadLayer("score.0", hidden, hidden, activation="relu")
        return Head("last", (first, HeadLayer("score.2", hidden, 1)))
    raise ModelFilesError(
        f"config.json: a reward model of model_type {kind!r} is not supported; supported: internlm2, qwen2, "
        "and any ...ForSequenceClassification"
    )


def hidden_size(hf: Mapping[str, Any]) -> int:
    value = hf.get("hidden_size") or hf.get("n_embd")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFilesError(f"config.json: hidden_size is {value!r}, wanted a positive integer; correct it")
    return value


def _modernbert_pooling(hf: Mapping[str, Any]) -> str:
    pooling = hf.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise ModelFilesError(f"config.json: classifier_pooling is {pooling!r}, wanted cls or mean; correct it")
    return str(pooling)


def _modernbert_dense(hf: Mapping[str, Any]) -> HeadLayer:
    activation = hf.get("classifier_activation", "gelu")
    if activation not in ACTIVATIONS:
        raise ModelFilesError(
            f"config.json: classifier_activation {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return HeadLayer(
        "head.dense",
        hidden_size(hf),
        hidden_size(hf),
        has_bias=bool(hf.get("classifier_bias", False)),
        activation=activation,
        norm="head.norm",
        norm_eps=float(hf.get("norm_eps", 1e-5)),
        has_norm_bias=bool(hf.get("norm_bias", False)),
    )
