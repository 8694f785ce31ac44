"""Tiny random models of every architecture in transformers, and ours made from their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, Qwen2Config, Qwen3Config

from lightserve.common.basemodel import CheckpointTensor, ModelArgs, ModelConfig, TpPartBaseModel
from lightserve.common.parallel import Parallel, RankGroup
from lightserve.models.registry import get_model_class

MAX_LEN = 128
NUM_SLOTS = 640
SHAPE = {"vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 2}
LLAMA = partial(
    LlamaConfig,
    **SHAPE,
    num_attention_heads=8,
    num_key_value_heads=2,
    intermediate_size=96,
    max_position_embeddings=MAX_LEN,
    rope_theta=500000.0,
)
SMALL = {**SHAPE, "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": MAX_LEN}
QWEN2 = partial(Qwen2Config, **SMALL)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

HF_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-gqa": LLAMA,
    "llama-tied-mha": lambda: LLAMA(num_key_value_heads=8, tie_word_embeddings=True),
    "llama-wide-heads": lambda: LLAMA(head_dim=32),
    "llama-biased": lambda: LLAMA(attention_bias=True, mlp_bias=True),
    "llama-llama3-rope": lambda: LLAMA(rope_scaling=dict(LLAMA3_ROPE)),
    "llama-yarn-rope": lambda: LLAMA(rope_scaling=dict(YARN_ROPE)),
    "llama-linear-rope": lambda: LLAMA(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "qwen2-one-kv-head": lambda: QWEN2(num_key_value_heads=1),
    "qwen2-tied": lambda: QWEN2(num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=32),
    "bloom-8-heads": lambda: BloomConfig(vocab_size=131, hidden_size=128, n_layer=2, n_head=8),
    "bloom-12-heads": lambda: BloomConfig(vocab_size=131, hidden_size=192, n_layer=2, n_head=12),
}


def build_hf(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model in float32, weights rounded to ``dtype``. Biases and norms are random, since 0 and 1 hide errors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HF_CONFIGS[name]()).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.15)
        parameter.data.copy_(parameter.data.to(dtype))
    return model


def checkpoint_of(hf: Any) -> Iterator[CheckpointTensor]:
    for name, tensor in hf.state_dict().items():
        yield CheckpointTensor(name, tensor, "memory")


ONE_RANK = RankGroup()


def build_ours(
    hf: Any, tp: RankGroup = ONE_RANK, dtype: torch.dtype = torch.float32, device: str = "cpu", max_len: int = MAX_LEN
) -> TpPartBaseModel:
    return build_model(hf.config.to_dict(), checkpoint_of(hf), tp, dtype, device, max_len)


def build_with_kv(
    hf: Any, kv_dtype: str | None, tp: RankGroup = ONE_RANK, scales: Mapping[str, Tensor] = MappingProxyType({})
) -> TpPartBaseModel:
    """Ours with a quantised KV cache; ``scales`` are tensors of the checkpoint beside those of ``hf``."""
    tensors = [*checkpoint_of(hf), *(CheckpointTensor(name, tensor, "memory") for name, tensor in scales.items())]
    metadata = [one._replace(tensor=one.tensor.to("meta")) for one in tensors]
    args = model_args(hf.config.to_dict(), tensors, tp)
    return get_model_class(args.config.model_type)(replace(args, kv_dtype=kv_dtype, tensor_metadata=metadata))


def model_args(hf_config: dict[str, Any], checkpoint: Iterable[CheckpointTensor] | None, tp: RankGroup) -> ModelArgs:
    return ModelArgs(
        config=ModelConfig.from_hf(hf_config),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=Parallel(tp=tp),
        checkpoint=checkpoint,
        max_total_token_num=NUM_SLOTS,
        max_reqs=8,
        max_req_total_len=MAX_LEN,
    )


def build_model(
    hf_config: dict[str, Any],
    checkpoint: Iterator[CheckpointTensor] | None,
    tp: RankGroup = ONE_RANK,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    max_len: int = MAX_LEN,
) -> TpPartBaseModel:
    args = model_args(hf_config, checkpoint, tp)
    args = replace(args, dtype=dtype, device=torch.device(device), max_req_total_len=max_len)
    return get_model_class(args.config.model_type)(args)


def hf_logits(hf: Any, sequences: list[list[int]]) -> Tensor:
    """The logits after the last token of each sequence, each computed alone."""
    with torch.inference_mode():
        return torch.stack([hf(torch.tensor([ids])).logits[0, -1] for ids in sequences])
