"""A tiny random model of an architecture: in transformers, and as a checkpoint for ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

from lightserve.common.basemodel import CheckpointTensor
from lightserve.model_files.config.text_part import TEXT_TYPES

MAX_LEN = 256
# small enough for a test in a second; heads are odd in number and wider than hidden_size / heads
SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_LEN,
}
IMAGE_TEXT_TYPES = {*TEXT_TYPES, "mistral4"}  # transformers lists them in this class
AUTO_CLASSES = {**dict.fromkeys(IMAGE_TEXT_TYPES, AutoModelForImageTextToText), "qwen2_audio": AutoModelForMultimodalLM}
# near 1: small norms of queries and keys make all scores alike, and small factors hide the layers before
ABOUT_ONE = (
    *("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm"),
    *("layer_scalar", "router.scale", "per_expert_scale"),
)
Json = dict[str, Any]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """``model_type`` and ``fields`` make transformers' config, which is the oracle.

    ``convert`` turns what transformers saves into the checkpoint of a model that transformers does not know.
    ``adapt_oracle`` then makes transformers' model compute what that model computes.
    """

    model_type: str
    fields: Json
    convert: Callable[[Json, Tensors], tuple[Json, Tensors]] | None = None
    adapt_oracle: Callable[[Any], Any] | None = None
    divides_among_ranks: bool = True
    divides_among_stages: bool = True  # of a pipeline


@dataclass(frozen=True)
class Tiny:
    hf: Any  # the model of transformers, in float32
    config_json: Json
    tensors: Tensors

    def checkpoint(self) -> Iterator[CheckpointTensor]:
        for name, tensor in self.tensors.items():
            yield CheckpointTensor(name, tensor, "memory")


def without(*fields: str) -> Callable[[Json, Tensors], tuple[Json, Tensors]]:
    """The config.json of an older file that lacks ``fields``."""
    return lambda config, tensors: ({key: config[key] for key in config if key not in fields}, tensors)


def build(case: Case, dtype: torch.dtype = torch.float32) -> Tiny:
    """Noise is in every weight, since norms of 1 and biases of 0 hide errors. ``dtype`` rounds the weights."""
    torch.manual_seed(0)
    auto_class = AUTO_CLASSES.get(case.model_type, AutoModelForCausalLM)
    hf = auto_class.from_config(
        AutoConfig.for_model(case.model_type, **deepcopy(case.fields))
    )  # Mistral 4 changes them
    hf = hf.float().eval()
    for name, weight in hf.state_dict().items():  # parameters, and buffers that a checkpoint has
        weight.normal_(std=0.15)
        if any(part in name for part in ABOUT_ONE):
            weight.add_(1)
        if name.endswith("A_log"):
            weight.sub_(3)  # slow decays: an error in a state shows many tokens later
        weight.copy_(weight.to(dtype))
    with TemporaryDirectory() as folder:
        hf.save_pretrained(folder)  # the names of the hub; the model in memory has others
        config_json = json.loads((Path(folder) / "config.json").read_text())
        tensors = load_file(Path(folder) / "model.safetensors")
    if case.convert is not None:
        config_json, tensors = case.convert(config_json, tensors)
    if case.adapt_oracle is not None:
        hf = case.adapt_oracle(hf)
    return Tiny(hf, config_json, tensors)


def hf_logits(hf: Any, ids: list[int]) -> Tensor:
    """Of every position."""
    with torch.inference_mode():
        logits: Tensor = hf(torch.tensor([ids])).logits[0]
    return logits
