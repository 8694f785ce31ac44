"""Weights that a process of its own broadcasts give a model like a new one, and no tensor moves.

So captured graphs stay valid. Every architecture, every format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from lightserve.common import (
    cpu_kernel,  # noqa: F401  registers its backend
    ops,
    triton_kernel,  # noqa: F401  registers its backend
)
from lightserve.common.basemodel import CheckpointTensor, LoraArgs, TpPartBaseModel
from lightserve.common.checkpoint.reader import open_checkpoint
from lightserve.common.cpu_kernel._library import BACKEND as NATIVE, library
from lightserve.common.cpu_kernel.packed_weight import Packed
from lightserve.common.quantization import LinearSpec, QuantizedLinear, eight_bit
from lightserve.errors import CheckpointError
from lightserve.model_files.lora.adapter import read_adapter
from lightserve.model_files.quantization import OnLoadConfig, OnLoadScheme
from lightserve.model_files.quantization.eight_bit import BLOCK
from lightserve.model_files.source import resolve
from lightserve.models.registry import get_model_class
from lightserve.offline.llm import LLM
from test.lora_files import LLAMA_TARGETS, linear_sizes, write_adapter
from test.models import eight_bit_files, test_eight_bit, test_fp8_experts, test_gguf_packed, test_packed_formats
from test.models.architectures.case import MAX_LEN, Tiny, build as build_tiny
from test.models.architectures.cases import CASES
from test.models.architectures.covering import sampled
from test.models.reloading import (
    PROMPTS,
    Build,
    assert_reloads,
    assert_same_places,
    load_in_parts,
    logits_of,
    other_tensors,
    places_of,
    random_tensors,
)
from test.models.session import Session
from test.models.test_mxfp4 import build_mxfp4
from test.models.tiny import ONE_RANK, build_hf, build_model, checkpoint_of, model_args
from test.pooling.files import new_model, save
from test.pooling.test_parity import ENCODERS

BACKENDS = [*([NATIVE] if library is not None else []), "cpu"]
KINDS = ["fp8", "int8", "w4"]
GGUF_TYPES = {"Q8_0": lambda _: "Q8_0", "Q4_0": lambda _: "Q4_0", "Q6_K": lambda _: "Q6_K"}


@pytest.fixture(autouse=True)
def _backends() -> Iterator[None]:
    ops.use_backend(*BACKENDS)
    yield
    ops.use_backend(ops.REFERENCE)


def build_of(config_json: dict[str, Any], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Build:
    return lambda checkpoint: build_model(config_json, checkpoint, ONE_RANK, dtype, device, max_len=MAX_LEN)


def tensors_of(tiny: Tiny) -> list[CheckpointTensor]:
    return list(tiny.checkpoint())


@pytest.mark.parametrize("name", sampled([*CASES]))
def test_every_architecture_loads_other_weights_in_place(name: str) -> None:
    tiny = build_tiny(CASES[name])

    assert_reloads(build_of(tiny.config_json), tensors_of(tiny), random_tensors(tiny.checkpoint()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_loaded_in_place(dtype: torch.dtype) -> None:
    tiny = build_tiny(CASES["gemma"], dtype)

    assert_reloads(build_of(tiny.config_json, dtype), tensors_of(tiny), random_tensors(tiny.checkpoint()))


def embeddings_of(llm: LLM) -> Tensor:
    return torch.stack([torch.from_numpy(vector) for vector in llm.embed(list(PROMPTS.values()))])


@pytest.mark.parametrize(("model_type", "fields"), ENCODERS, ids=[name for name, _ in ENCODERS])
def test_an_encoder_loads_other_weights_in_place(tmp_path: Path, model_type: str, fields: dict[str, Any]) -> None:
    hf = new_model(AutoModel, model_type, **fields)
    llm = LLM(str(save(hf, tmp_path / "first")), device="cpu", data_type="float32")
    first, places = embeddings_of(llm), places_of(llm.worker.model)
    for parameter in hf.parameters():
        parameter.data.copy_(parameter.data.flip(0))
    other = LLM(str(save(hf, tmp_path / "second")), device="cpu", data_type="float32")

    load_in_parts(llm.worker.model, list(open_checkpoint(resolve(str(tmp_path / "second")))))

    assert_same_places(places_of(llm.worker.model), places)
    assert torch.equal(embeddings_of(llm), embeddings_of(other))
    assert not torch.equal(embeddings_of(llm), first)


# formats


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", test_packed_formats.CASES)
def test_a_packed_format_is_loaded_in_place(name: str, backend: str) -> None:
    ops.use_backend(backend)
    case, hf = test_packed_formats.CASES[name], test_packed_formats.build_hf()
    checkpoint = test_packed_formats.pack(hf, case)

    config_json = {**hf.config.to_dict(), "quantization_config": case.config}
    assert_reloads(build_of(config_json), checkpoint, other_tensors(checkpoint))


@pytest.mark.parametrize("name", eight_bit_files.FILES)
def test_a_format_of_8_bits_is_loaded_in_place(name: str) -> None:
    hf, files = test_eight_bit.wide_llama(), eight_bit_files.FILES[name]
    checkpoint = eight_bit_files.quantized(hf, files.pack)

    config_json = {**hf.config.to_dict(), "quantization_config": files.config}
    assert_reloads(build_of(config_json), checkpoint, other_tensors(checkpoint))


def test_scales_that_blocks_of_rows_share_are_loaded_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""

    def shared(_: object, weight: ops.Fp8Weight, spec: LinearSpec) -> ops.Fp8Weight:
        return weight.share_scales(BLOCK) if eight_bit.has_whole_blocks(spec) else weight

    monkeypatch.setattr(eight_bit.EightBitFormat, "in_final_layout", shared)
    hf, files = test_eight_bit.wide_llama(), eight_bit_files.FILES["fp8-block"]
    checkpoint = eight_bit_files.quantized(hf, files.pack)
    build = build_of({**hf.config.to_dict(), "quantization_config": files.config})

    method = build(iter(checkpoint)).layer_weights[0].o_proj.method
    assert isinstance(method, QuantizedLinear)
    assert method.weight.scales.shape == (2, 2)
    assert_reloads(build, checkpoint, other_tensors(checkpoint))


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_experts_in_fp8_blocks_are_loaded_in_place(name: str) -> None:
    case = replace(CASES[name], fields={**CASES[name].fields, "moe_intermediate_size": 160})
    first, second = (test_fp8_experts.quantized(tiny)[0] for tiny in _two(build_tiny(case)))

    assert_reloads(build_of(first.config_json), tensors_of(first), tensors_of(second))


def _two(tiny: Tiny) -> tuple[Tiny, Tiny]:
    other = {one.name: one.tensor for one in random_tensors(tiny.checkpoint())}
    return tiny, replace(tiny, tensors=other)


def test_experts_in_mxfp4_are_loaded_in_place() -> None:
    tiny = build_mxfp4()

    assert_reloads(build_of(tiny.config_json), tensors_of(tiny), other_tensors(tiny.checkpoint()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gemma", "mixtral"])
def test_weights_that_are_quantised_while_loading_are_loaded_in_place(name: str, kind: str) -> None:
    fields = {**CASES[name].fields, "hidden_size": 96, "intermediate_size": 64}
    tiny = build_tiny(replace(CASES[name], fields=fields))
    args = model_args(tiny.config_json, None, ONE_RANK)
    config = replace(args.config, quantization=OnLoadConfig(OnLoadScheme(kind)))

    def build(checkpoint: Iterator[CheckpointTensor]) -> TpPartBaseModel:
        return get_model_class(config.model_type)(replace(args, config=config, checkpoint=checkpoint))

    assert_reloads(build, tensors_of(tiny), random_tensors(tiny.checkpoint()))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", [*GGUF_TYPES, "mixed"])
def test_a_gguf_file_is_loaded_in_place(name: str, is_packed: bool, tmp_path: Path) -> None:
    type_of = test_gguf_packed.mixed if name == "mixed" else GGUF_TYPES[name]
    source = test_gguf_packed.save_llama(tmp_path / "model.gguf", type_of, is_tied=name != "mixed")
    source = replace(source, is_packed=is_packed)
    checkpoint = list(open_checkpoint(source))
    if is_packed and library is not None:
        assert has_packed(test_gguf_packed.model_of(source))

    assert_reloads(build_of(source.hf_config()), checkpoint, other_tensors(checkpoint))


def has_packed(model: TpPartBaseModel) -> bool:
    method = model.layer_weights[0].o_proj.method
    return isinstance(method, QuantizedLinear) and isinstance(method.weight, Packed)


def with_input_scale(checkpoint: list[CheckpointTensor], scale: float) -> list[CheckpointTensor]:
    """As on devices whose products round their inputs."""
    is_scale = [one.name.endswith("input_scale") for one in checkpoint]
    assert any(is_scale)
    pairs = zip(checkpoint, is_scale, strict=True)
    return [one._replace(tensor=torch.full_like(one.tensor, scale)) if is_one else one for one, is_one in pairs]


def test_a_smaller_scale_of_inputs_replaces_the_larger_one_before() -> None:
    """The parts of a linear have one scale, the largest of theirs."""
    ops.use_backend(ops.REFERENCE)
    test_eight_bit.rounds_inputs()
    hf, files = test_eight_bit.wide_llama(), eight_bit_files.FILES["fp8-static"]
    checkpoint = eight_bit_files.quantized(hf, files.pack)
    config_json = {**hf.config.to_dict(), "quantization_config": files.config}

    assert_reloads(build_of(config_json), checkpoint, with_input_scale(checkpoint, 0.01))


def test_act_order_cannot_replace_weights_without_it() -> None:
    """Steps that were captured do not reorder their inputs."""
    case, hf = test_packed_formats.CASES["gptq-act-order"], test_packed_formats.build_hf()
    checkpoint = test_packed_formats.pack(hf, case)
    in_order = [
        one._replace(tensor=one.tensor.sort().values) if one.name.endswith("g_idx") else one for one in checkpoint
    ]
    model = build_of({**hf.config.to_dict(), "quantization_config": case.config})(iter(in_order))

    with pytest.raises(CheckpointError, match=r"layers.0.self_attn.q_proj has act-order, but the weights before had"):
        model.load_weights(checkpoint)


# what is derived from weights


def with_large_key(hf: Any, layer: int, scale: float) -> list[CheckpointTensor]:
    """Its keys are scaled, and so are the adapters of its queries and keys."""
    tensors = {one.name: one.tensor.clone() for one in checkpoint_of(hf)}
    at = f"model.layers.{layer}.self_attn"
    tensors[f"{at}.k_proj.bias"][3] = 300.0
    tensors[f"{at}.k_scale"] = torch.tensor(scale)
    return [CheckpointTensor(name, tensor, "memory") for name, tensor in tensors.items()]


def test_scales_of_keys_are_loaded_in_place() -> None:
    hf = build_hf("qwen2-tied")
    args = replace(model_args(hf.config.to_dict(), None, ONE_RANK), kv_dtype="fp8", lora=LoraArgs(2, 16))

    def build(checkpoint: Iterator[CheckpointTensor]) -> TpPartBaseModel:
        return get_model_class("qwen2")(replace(args, checkpoint=checkpoint))

    assert_reloads(build, with_large_key(hf, 0, 0.5), with_large_key(hf, 1, 0.25))


def test_adapters_get_the_factors_of_the_new_keys() -> None:
    hf = build_hf("qwen2-tied")
    args = replace(model_args(hf.config.to_dict(), None, ONE_RANK), kv_dtype="int8", lora=LoraArgs(2, 16))
    model = get_model_class("qwen2")(replace(args, checkpoint=with_large_key(hf, 0, 1.0)))

    model.load_weights(with_large_key(hf, 1, 1.0))

    first, second = (layer.qkv_proj.lora.row_factors for layer in model.layer_weights)  # type: ignore[attr-defined]
    assert (first == 1).all()
    assert second.max() > 1


def test_an_adapter_is_merged_into_the_new_weights(tmp_path: Path) -> None:
    hf = build_hf("llama-gqa")
    adapter = read_adapter(write_adapter(tmp_path, linear_sizes(hf, LLAMA_TARGETS)))
    args = replace(model_args(hf.config.to_dict(), None, ONE_RANK), merged_adapter=adapter)

    def build(checkpoint: Iterator[CheckpointTensor]) -> TpPartBaseModel:
        return get_model_class("llama")(replace(args, checkpoint=checkpoint))

    assert_reloads(build, list(checkpoint_of(hf)), random_tensors(checkpoint_of(hf)))


# failures

NORM = "model.layers.1.input_layernorm.weight"
WRONG: dict[str, tuple[Callable[[Tensor], Tensor | None], str]] = {
    "missing": (lambda tensor: None, f"lacks 1 tensors: {NORM}"),
    "shape": (lambda tensor: tensor[:-1], rf"{NORM} has shape \(63,\), but config.json needs \(64,\)"),
    "dtype": (lambda tensor: tensor.to(torch.int8), f"{NORM} is int8"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("kind", [None, "w4"])
def test_after_a_checkpoint_that_does_not_fit_another_can_be_loaded(what: str, kind: str | None) -> None:
    change, message = WRONG[what]
    hf = build_hf("llama-gqa")
    args = model_args(hf.config.to_dict(), list(checkpoint_of(hf)), ONE_RANK)
    if kind is not None:
        args = replace(args, config=replace(args.config, quantization=OnLoadConfig(OnLoadScheme(kind))))
    model = get_model_class("llama")(args)
    logits, places = logits_of(model), places_of(model)
    other = ((one, change(one.tensor) if one.name == NORM else one.tensor) for one in random_tensors(checkpoint_of(hf)))

    with pytest.raises(CheckpointError, match=message):
        model.load_weights(one._replace(tensor=tensor) for one, tensor in other if tensor is not None)

    model.load_weights(checkpoint_of(hf))
    assert torch.equal(logits_of(model), logits)
    assert_same_places(places_of(model), places)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8-block", "fp8-static", None])
def test_a_captured_step_computes_with_the_new_weights(name: str | None) -> None:
    hf = test_eight_bit.wide_llama()
    config_json, checkpoint = hf.config.to_dict(), list(checkpoint_of(hf))
    if name is not None:
        config_json["quantization_config"] = eight_bit_files.FILES[name].config
        checkpoint = eight_bit_files.quantized(hf, eight_bit_files.FILES[name].pack)
    ops.use_backend("triton")
    build = build_of(config_json, torch.bfloat16, "cuda")
    model = build(iter(checkpoint))
    step = Session(model).input_of({0: [5]})
    model.forward(step)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model.forward(step)

    model.load_weights(other_tensors(checkpoint))
    graph.replay()

    expected = build(iter(other_tensors(checkpoint)))
    assert torch.equal(logits, expected.forward(Session(expected).input_of({0: [5]})))
