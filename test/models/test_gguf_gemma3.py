"""A Gemma 3 in a GGUF file gives the logits of transformers: windows, two rotary bases, norms stored as 1 + weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from lightserve.common.checkpoint.reader import open_checkpoint
from lightserve.model_files import resolve
from lightserve.model_files.model_config import ModelConfig
from test.models.architectures.case import MAX_LEN, Case, Tiny, build, hf_logits
from test.models.architectures.dense_b import GEMMA2
from test.models.session import Session
from test.models.test_architectures import PROMPT
from test.models.tiny import build_model

ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
# the sixth of seven layers is not windowed; the scale is that of head_dim
CASE = Case(
    "gemma3_text",
    {**GEMMA2, "num_hidden_layers": 7, "query_pre_attn_scalar": GEMMA2["head_dim"], "rope_parameters": ROPE},
)


def save_as_gguf(tiny: Tiny, path: Path) -> Path:
    """As llama.cpp's converter does."""
    writer, config = gguf.GGUFWriter(path, "gemma3"), tiny.hf.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, tensor in tiny.tensors.items():
        values = tensor + 1 if name.endswith("norm.weight") else tensor
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values.numpy())
    _add_fields(writer, config)
    return _finish(writer, path)


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_fields(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(MAX_LEN)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(ROPE["full_attention"]["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(ROPE["full_attention"]["factor"])


def test_it_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    tiny = build(CASE)
    source = resolve(str(save_as_gguf(tiny, tmp_path / "model.gguf")))

    model = build_model(source.hf_config(), open_checkpoint(source), max_len=MAX_LEN)
    ours = Session(model).step({0: PROMPT})[0]

    theirs = hf_logits(tiny.hf, PROMPT)[-1]
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize(("layers", "scalar"), [(7, 16), (62, 8)])
def test_the_27b_model_scales_attention_by_hidden_size_per_head(layers: int, scalar: int, tmp_path: Path) -> None:
    tiny = build(CASE)
    tiny.hf.config.num_hidden_layers = layers
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.add_tensor("token_embd.weight", tiny.tensors["model.embed_tokens.weight"].numpy())
    _add_fields(writer, tiny.hf.config)

    found = ModelConfig.from_hf(resolve(str(_finish(writer, tmp_path / "model.gguf"))).hf_config())

    assert found.number("query_pre_attn_scalar") == scalar
