"""Loading is one pass over a checkpoint, and every error names the tensor and its file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from lightserve.common.basemodel import CheckpointTensor, ModelArgs, ModelConfig, RmsNormWeight, TpPartBaseModel
from lightserve.common.basemodel.layer_weights.loader import load_weights
from lightserve.common.parallel import Parallel
from lightserve.errors import CheckpointError, ModelFilesError
from lightserve.models.registry import get_model_class
from test.models.architectures.case import build as build_tiny
from test.models.architectures.cases import CASES
from test.models.session import Session
from test.models.tiny import HF_CONFIGS, build_hf, build_model, checkpoint_of

Tensors = Iterator[CheckpointTensor]
NORM = "model.layers.1.input_layernorm.weight"


def build(hf: Any, checkpoint: Tensors | None) -> TpPartBaseModel:
    config = ModelConfig.from_hf(hf.config.to_dict())
    args = ModelArgs(config, torch.float32, torch.device("cpu"), Parallel(), checkpoint, 64, 4, 64)
    return get_model_class(config.model_type)(args)


def changed(hf: Any, change: Callable[[CheckpointTensor], CheckpointTensor | None]) -> Tensors:
    for tensor in checkpoint_of(hf):
        if (out := change(tensor._replace(file="shard-7.safetensors"))) is not None:
            yield out


def test_missing_tensors_are_named() -> None:
    hf = build_hf("llama-gqa")
    checkpoint = changed(hf, lambda t: None if "input_layernorm" in t.name else t)

    with pytest.raises(CheckpointError, match=rf"lacks 2 tensors: .*layers\.0.*, {NORM}"):
        build(hf, checkpoint)


def test_a_misshapen_tensor_is_named_with_its_file_and_both_shapes() -> None:
    hf = build_hf("llama-gqa")
    checkpoint = changed(hf, lambda t: t._replace(tensor=t.tensor[:-1]) if t.name == NORM else t)

    with pytest.raises(CheckpointError, match=rf"shard-7\.safetensors: {NORM} has shape \(63,\).*needs \(64,\)"):
        build(hf, checkpoint)


def test_a_wrongly_typed_tensor_is_named_with_its_file() -> None:
    hf = build_hf("llama-gqa")
    checkpoint = changed(hf, lambda t: t._replace(tensor=t.tensor.to(torch.int8)) if t.name == NORM else t)

    with pytest.raises(CheckpointError, match=rf"shard-7\.safetensors: {NORM} is int8"):
        build(hf, checkpoint)


def test_an_8_bit_float_is_refused_because_its_scale_would_be_ignored() -> None:
    hf = build_hf("llama-gqa")
    checkpoint = changed(hf, lambda t: t._replace(tensor=t.tensor.to(torch.float8_e4m3fn)) if t.name == NORM else t)

    with pytest.raises(CheckpointError, match=rf"shard-7\.safetensors: {NORM} is float8_e4m3fn"):
        build(hf, checkpoint)


def test_a_misshapen_fused_projection_is_named_with_its_file() -> None:
    hf = build_hf("bloom-8-heads")
    fused = "h.1.self_attention.query_key_value.bias"
    checkpoint = changed(hf, lambda t: t._replace(tensor=t.tensor[:-1]) if t.name.endswith(fused) else t)

    with pytest.raises(CheckpointError, match=rf"shard-7\.safetensors: {fused} has shape \(383,\), .* needs \(384,\)"):
        build(hf, checkpoint)


def test_unused_tensors_are_named_with_their_file_and_the_model_loads(log: pytest.LogCaptureFixture) -> None:
    hf = build_hf("llama-gqa")

    def with_extra() -> Tensors:
        yield from checkpoint_of(hf)
        yield CheckpointTensor("model.layers.0.vision.weight", torch.ones(3), "shard-7.safetensors")

    build(hf, with_extra())

    assert "model.layers.0.vision.weight (shard-7.safetensors)" in log.text


@pytest.mark.parametrize(("name", "layer"), [("llama-gqa", "model.layers.1"), ("bloom-8-heads", "h.1")])
def test_a_checkpoint_with_more_layers_than_the_config_is_refused(name: str, layer: str) -> None:
    hf = build_hf(name)
    checkpoint = [tensor._replace(file="shard-7.safetensors") for tensor in checkpoint_of(hf)]
    hf.config.num_hidden_layers = 1

    with pytest.raises(CheckpointError, match=rf"has layers 0 to 1, .* says 1: {layer}\..* \(shard-7\.safetensors\)"):
        build(hf, iter(checkpoint))


def test_layers_of_another_kind_behind_the_last_are_a_warning(log: pytest.LogCaptureFixture) -> None:
    """DeepSeek and GLM store layers for multi-token prediction there: decoder layers with more tensors."""
    hf = build_hf("llama-gqa")

    def with_mtp_layer() -> Tensors:
        for tensor in checkpoint_of(hf):
            yield tensor
            if ".layers.1." in tensor.name:
                yield tensor._replace(name=tensor.name.replace(".layers.1.", ".layers.2."))
        yield CheckpointTensor("model.layers.2.eh_proj.weight", torch.ones(3), "memory")

    build(hf, with_mtp_layer())

    assert "not used: 10 tensors: model.layers.2.self_attn.q_proj.weight (memory), " in log.text
    assert "and 2 more" in log.text


def test_part_of_a_layer_behind_the_last_is_a_warning(log: pytest.LogCaptureFixture) -> None:
    hf = build_hf("llama-gqa")

    def with_leftover() -> Tensors:
        yield from checkpoint_of(hf)
        yield CheckpointTensor("model.layers.2.input_layernorm.weight", torch.ones(64), "memory")
        yield CheckpointTensor("vision.layers.0.self_attn.q_proj.weight", torch.ones(64), "memory")

    build(hf, with_leftover())

    assert "not used: 2 tensors: model.layers.2.input_layernorm.weight (memory), vision.layers.0" in log.text


def test_a_tied_head_in_the_checkpoint_is_not_reported(log: pytest.LogCaptureFixture) -> None:
    hf = build_hf("qwen2-tied")
    assert "lm_head.weight" in hf.state_dict()

    build(hf, checkpoint_of(hf))

    assert not log.text


def test_a_layer_is_completed_when_its_last_tensor_was_read() -> None:
    """Layers that are packed need memory until then."""
    tiny = build_tiny(CASES["gemma"])
    model = build_model(tiny.config_json, tiny.checkpoint())
    weight = model.layer_weights[0].att_norm
    assert isinstance(weight, RmsNormWeight)
    norms = []

    def read() -> Tensors:
        layer_by_layer = sorted(tiny.checkpoint(), key=lambda tensor: "layers.0." not in tensor.name)
        for tensor in layer_by_layer:
            if "layers.0." not in tensor.name:
                norms.append(weight.tensor.clone())
            yield tensor

    load_weights([model.pre_post_weight, *model.layer_weights], read(), model.config.num_layers)

    expected = tiny.tensors["model.layers.0.input_layernorm.weight"] + 1
    torch.testing.assert_close(norms[0], expected)


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_dummy_weights_have_the_shape_of_the_config_and_give_finite_logits(name: str) -> None:
    hf = build_hf(name)

    model = build(hf, None)

    logits = Session(model).step({0: [1, 2, 3]})
    assert logits.shape == (1, 131)
    assert logits.isfinite().all()
    assert logits.std() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba"},
            "model_type 'mamba' is not supported; .*`lightserve models` lists the [0-9]+ that",
        ),
        ({"model_type": "llama5"}, "model_type 'llama5' is not supported; did you mean llama[?] "),
        ({"rope_scaling": {"rope_type": "unknown", "factor": 2.0}}, "rope type 'unknown' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor has 0 values, wanted 4"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported for llama; supported: silu, "),
        ({"hidden_act": "xielu"}, "a gated feed-forward with xielu is not supported; supported: silu, gelu"),
        ({"hidden_act": "relu"}, "a gated feed-forward with relu is not supported; supported: silu, gelu"),
        ({"sliding_window": 16}, "sliding_window 16 is not supported for llama"),
        ({"sliding_window": 0}, "sliding_window is 0, wanted a positive integer"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer type linear_attention is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*, wanted a list of 2 names"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', wanted true or false"),
        ({"num_hidden_layers": None, "n_layer": None}, "config.json has no num_hidden_layers"),
        ({"quantization_config": {"quant_method": "higgs"}}, "quant_method 'higgs' is not supported"),
        ({"hidden_size": "64"}, "hidden_size is '64', wanted a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, wanted a positive integer"),
        ({"vocab_size": -1}, "vocab_size is -1, wanted a positive integer"),
        ({"num_key_value_heads": 3}, "3 KV heads do not divide 8 heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', wanted an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs a factor"),
    ],
)
def test_an_unsupported_config_is_refused(changes: dict[str, Any], message: str) -> None:
    hf = build_hf("llama-gqa")
    hf_config = {**hf.config.to_dict(), "rope_parameters": None, **changes}
    hf.config.to_dict = lambda: hf_config

    with pytest.raises(ModelFilesError, match=message):
        build(hf, None)


MEASURE = """
import json, resource, sys, torch
from lightserve.common.basemodel import ModelArgs, ModelConfig
from lightserve.common.checkpoint.reader import open_checkpoint
from lightserve.common.parallel import Parallel, RankGroup
from lightserve.model_files.source import resolve
from lightserve.models.llama.model import LlamaTpPartModel

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024

source = resolve(sys.argv[1])
config = ModelConfig.from_hf(source.hf_config())
before = peak()
parallel = Parallel(tp=RankGroup(1, 2))
args = ModelArgs(config, torch.float32, torch.device("cpu"), parallel, open_checkpoint(source), 64, 4, 64)
model = LlamaTpPartModel(args)
layers = [model.pre_post_weight, *model.layer_weights]
own = sum(p.into.nbytes for layer in layers for p in layer.pieces() if p.into is not None)
print(json.dumps({"grown": peak() - before, "own": own}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's peak memory")
def test_loading_a_rank_takes_little_more_memory_than_its_weights_and_one_file(tmp_path: Path) -> None:
    hf_config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    largest = _write_sharded(hf_config, tmp_path, num_files=8)

    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )

    assert run.returncode == 0, run.stderr
    measured = json.loads(run.stdout)
    assert measured["own"] > 200e6
    assert measured["grown"] < 1.2 * largest + measured["own"]


def _write_sharded(hf_config: LlamaConfig, folder: Path, num_files: int) -> int:
    """A checkpoint of random weights in ``num_files`` files; the size of the largest."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(hf_config).state_dict().items()}
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for i in range(num_files):
        file = f"model-{i}.safetensors"
        part = names[i::num_files]
        save_file({name: torch.randn(shapes[name]) for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    hf_config.save_pretrained(folder)
    return max(file.stat().st_size for file in folder.glob("*.safetensors"))
