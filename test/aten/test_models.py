"""Models of transformers with all operators replaced: logits of a prompt and of a decode step, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTNeoXConfig, MixtralConfig

from test.aten.devices import each_device, enable_all, on
from test.aten.test_aten import calls
from test.models.tiny import build_hf

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 99}


def llama() -> Any:
    return build_hf("llama-gqa")


def gpt_neox() -> Any:
    """With layer norms, biases and gelu."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(GPTNeoXConfig(**SIZES)).float().eval()


def mixtral() -> Any:
    """With top-k, and products of batches and softmax for its attention."""
    torch.manual_seed(0)
    config = MixtralConfig(
        **SIZES | {"num_hidden_layers": 1}, num_key_value_heads=2, num_local_experts=4, attn_implementation="eager"
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


COMMON = {"mm", "embedding"}
CALLED = {
    llama: COMMON | {"silu", "scaled_dot_product_attention"},
    gpt_neox: COMMON | {"addmm", "gelu", "native_layer_norm", "scaled_dot_product_attention"},
    mixtral: COMMON | {"bmm", "_softmax", "topk"},
}
each_model = pytest.mark.parametrize("build", CALLED)


def ids_on(device: str) -> Tensor:
    return torch.arange(1, 15, device=on(device)).view(2, 7)


@each_device
@each_model
def test_a_model_computes_the_same_logits(device: str, build: Callable[[], Any]) -> None:
    hf, ids = build().to(on(device)), ids_on(device)
    logits = []
    with torch.no_grad():
        for is_enabled in (False, True):
            if is_enabled:
                enable_all(device)
            prompt = hf(ids, use_cache=True)
            step = hf(ids[:, :1], past_key_values=prompt.past_key_values)
            logits.append(torch.cat((prompt.logits, step.logits), 1))

    if device != "cpu":
        assert calls().keys() >= CALLED[build]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@each_device
@each_model
def test_a_training_step_has_the_same_gradients(device: str, build: Callable[[], Any]) -> None:
    hf, ids = build().to(on(device)), ids_on(device)
    found: list[dict[str, Tensor]] = []
    for is_enabled in (False, True):
        if is_enabled:
            enable_all(device)
        hf.zero_grad()
        loss = hf(ids, labels=ids).loss
        loss.backward()
        grads = {name: weight.grad.clone() for name, weight in hf.named_parameters() if weight.grad is not None}
        found.append({"loss": loss.detach(), **grads})

    assert len(found[0]) > 1 + 5 * hf.config.num_hidden_layers
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)
