"""A GGUF file whose blocks stay packed gives the logits of the same file with expanded blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gguf.constants import GGMLQuantizationType
from torch import Tensor
from transformers import LlamaConfig

from lightserve.common import ops
from lightserve.common.basemodel import ModelArgs, ModelConfig, Parallel, RankGroup, TpPartBaseModel
from lightserve.common.checkpoint.reader import open_checkpoint, tensor_metadata, total_bytes
from lightserve.common.cpu_kernel._library import BACKEND, library
from lightserve.common.cpu_kernel.packed_experts import PackedExperts
from lightserve.common.device.cpu import CpuDevice
from lightserve.common.parallel import ParallelSizes, connect_ranks
from lightserve.common.quantization import (
    GgufFormat,
    QuantizedExperts,
    QuantizedLinear,
    StackedLinear,
    UnquantizedLinear,
)
from lightserve.config import WorkerConfig
from lightserve.errors import CheckpointError
from lightserve.model_files import resolve
from lightserve.model_files.gguf.header import ENCODINGS
from lightserve.model_files.quantization import PACKED_TYPES, GgufQuantConfig, GgufScheme, OnLoadConfig
from lightserve.model_files.source import GgufSource, stored_as
from lightserve.models.registry import get_model_class, read_model_config
from lightserve.worker.worker import ModelWorker
from test.common.test_gguf import SCALES, random_blocks
from test.model_files.files import finish, start_gguf
from test.models.architectures.case import Case, build
from test.models.gguf_cases import GGUF_CASES
from test.models.gguf_converter import save
from test.models.session import Session
from test.ranks import run_ranks

PROMPTS = {0: [5, 17, 3, 99, 42, 8, 1], 1: [77, 2, 130], 2: [64]}
ONE_RANK = RankGroup()
CONFIG = LlamaConfig(
    vocab_size=131,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=512,
)
LAYER_SHAPES = {
    "attn_q": (256, 256),
    "attn_k": (128, 256),
    "attn_v": (128, 256),
    "attn_output": (256, 256),
    "ffn_gate": (512, 256),
    "ffn_up": (512, 256),
    "ffn_down": (256, 512),
}
TypeOf = Callable[[str], str]


def blocks_of(name: str, rows: int, columns: int) -> Any:
    """Random blocks with the standard deviation of a weight."""
    kind = GGMLQuantizationType[name]
    blocks = random_blocks(name, rows, columns)
    if name not in PACKED_TYPES:
        return blocks
    factor = np.float16(0.05 / np.std(gguf.quants.dequantize(blocks, kind)))
    by_block = blocks.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    for at in SCALES[name]:
        by_block[:, at : at + 2] = (by_block[:, at : at + 2].copy().view(np.float16) * factor).view(np.uint8)
    return blocks


def save_llama(path: Path, type_of: TypeOf, is_tied: bool = True, *, split_max_tensors: int = 0) -> GgufSource:
    """A Llama whose linears and vocabularies have the type ``type_of`` their name in the file."""
    writer = start_gguf(path, "llama", CONFIG, split_max_tensors)
    shapes = {f"blk.{i}.{name}": shape for i in range(2) for name, shape in LAYER_SHAPES.items()}
    shapes |= {"token_embd": (131, 256)} if is_tied else {"token_embd": (131, 256), "output": (131, 256)}
    for name, shape in shapes.items():
        raw_type = GGMLQuantizationType[type_of(name)]
        writer.add_tensor(f"{name}.weight", blocks_of(raw_type.name, *shape), raw_dtype=raw_type)
    for name in ("output_norm", *(f"blk.{i}.{norm}_norm" for i in range(2) for norm in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.random.default_rng(0).standard_normal(256, dtype=np.float32))
    finish(writer, path)
    source = resolve(str(path.parent if split_max_tensors else path))
    assert isinstance(source, GgufSource)
    return source


def packed(source: GgufSource) -> GgufSource:
    return replace(source, is_packed=True)


def model_of(source: GgufSource, tp: RankGroup = ONE_RANK, *, is_dummy: bool = False) -> TpPartBaseModel:
    config = ModelConfig.from_hf(source.hf_config())
    checkpoint = None if is_dummy else open_checkpoint(source)
    args = ModelArgs(
        config, torch.float32, torch.device("cpu"), Parallel(tp=tp), checkpoint, 512, 8, 128, tensor_metadata(source)
    )
    return get_model_class(config.model_type)(args)


def layer_of(model: TpPartBaseModel, number: int) -> Any:
    return model.layer_weights[number]


def logits_of(model: TpPartBaseModel) -> Tensor:
    session = Session(model)
    return torch.cat([session.step(PROMPTS), session.step({0: [11], 1: [12, 13], 2: [14]})])


def assert_same_logits(source: GgufSource, packed_logits: Tensor) -> None:
    expected = logits_of(model_of(source))
    torch.testing.assert_close(packed_logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_repacked_blocks_have_the_values_of_the_gguf_package(name: str) -> None:
    blocks = random_blocks(name, 7, 512)
    encoding = next(one for one in ENCODINGS.values() if one.name == name)

    weight = GgufFormat(GgufScheme(encoding)).convert({"weight": torch.from_numpy(blocks)})

    expected = torch.from_numpy(np.array(gguf.quants.dequantize(blocks, GGMLQuantizationType[name])))
    # numbers from 0 to 15 become numbers from -8 to 7, with another offset, which may be rounded
    tolerance = 2**-22 * float(expected.abs().max()) if name in ("Q4_1", "Q4_K") else 0
    torch.testing.assert_close(weight.dequantize(), expected, rtol=0, atol=tolerance)
    assert 8 * weight.nbytes == PACKED_TYPES[name].bits * expected.numel()


def test_experts_are_repacked_as_a_leading_dimension() -> None:
    encoding = next(one for one in ENCODINGS.values() if one.name == "Q4_K")
    blocks = torch.from_numpy(random_blocks("Q4_K", 6, 512))

    weight = GgufFormat(GgufScheme(encoding)).convert({"weight": blocks.view(2, 3, -1)})

    alone = GgufFormat(GgufScheme(encoding)).convert({"weight": blocks[3:]})
    assert weight.shape == (2, 3, 512)
    assert torch.equal(weight.dequantize()[1], alone.dequantize())


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_columns_of_heads_change_places_although_blocks_cut_heads(name: str) -> None:
    """Three value heads for each of two key heads: the first of each comes first."""
    encoding = next(one for one in ENCODINGS.values() if one.name == name)
    raw = {"weight": torch.from_numpy(random_blocks(name, 5, 768))}
    file_order = GgufFormat(GgufScheme(encoding)).convert(raw).dequantize()

    weight = GgufFormat(GgufScheme(encoding, column_tiles=(3, 2))).convert(raw).dequantize()

    heads = file_order.view(5, 6, 128)
    assert torch.equal(weight.view(5, 6, 128), heads[:, [0, 2, 4, 1, 3, 5]])


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_a_model_of_every_type_gives_the_logits_of_the_expanded_one(name: str, tmp_path: Path) -> None:
    source = save_llama(tmp_path / "model.gguf", lambda _: name)

    model = model_of(packed(source))

    assert isinstance(layer_of(model, 0).qkv_proj.method, QuantizedLinear)
    assert isinstance(model.pre_post_weight.embedding.method, QuantizedLinear)
    assert_same_logits(source, logits_of(model))


def mixed(name: str) -> str:
    """As Q4_K_M, and a plain linear among packed ones."""
    if name.endswith(("attn_v", "ffn_down", "output")):
        return "Q6_K"
    return "F16" if name == "blk.1.ffn_up" else "Q4_K"


def test_parts_of_a_linear_may_have_different_types(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "model.gguf", mixed, is_tied=False)

    model = model_of(packed(source))

    qkv, gate_up = layer_of(model, 0).qkv_proj.method, layer_of(model, 1).ffn.gate_up_proj.method
    assert isinstance(qkv, StackedLinear)
    assert len(qkv.methods) == 2
    assert isinstance(gate_up, StackedLinear)
    assert isinstance(gate_up.methods[1], UnquantizedLinear)
    assert_same_logits(source, logits_of(model))


def _run_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    tp = connect_ranks(rank, ParallelSizes(tp=size), f"file://{folder}/store", "gloo").tp
    source = resolve(f"{folder}/model.gguf")
    assert isinstance(source, GgufSource)
    torch.save(logits_of(model_of(packed(source), tp)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.tp
@pytest.mark.slow
def test_ranks_split_blocks_of_256_into_groups(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "model.gguf", mixed, is_tied=False)

    run_ranks(_run_rank, 2, 2, str(tmp_path))

    for rank in range(2):
        assert_same_logits(source, torch.load(tmp_path / f"{rank}.pt", weights_only=True))


def test_a_split_model_stays_packed_in_all_files(tmp_path: Path) -> None:
    (tmp_path / "split").mkdir()
    whole = save_llama(tmp_path / "model.gguf", mixed)
    split = save_llama(tmp_path / "split" / "model.gguf", mixed, split_max_tensors=4)

    assert len(split.weight_files()) > 2
    assert torch.equal(logits_of(model_of(packed(split))), logits_of(model_of(packed(whole))))


def test_ranks_that_cut_a_group_have_smaller_ones(tmp_path: Path) -> None:
    source = save_case("qwen2", tmp_path / "model.gguf")

    method = model_of(packed(source), RankGroup(rank=1, size=2), is_dummy=True).layer_weights[0].o_proj.method

    assert isinstance(method, QuantizedLinear)
    assert method.weight.group_size == 16


def test_dummy_weights_of_a_packed_file_give_finite_logits(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "model.gguf", mixed)

    logits = logits_of(model_of(packed(source), is_dummy=True))

    assert logits.isfinite().all()
    assert logits.std() > 0


WIDTHS = ("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_hidden_size", "moe_intermediate_size")


def wider(case: Case) -> Case:
    """With rows of whole blocks."""
    sizes = {28: 32, 40: 64, 48: 96, 192: 384}
    fields = {key: sizes.get(value, value) if key in WIDTHS else value for key, value in case.fields.items()}
    return replace(case, fields=fields)


def save_case(
    name: str, path: Path, quantized: str = "^(?!.*norm)", kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0
) -> GgufSource:
    one = replace(GGUF_CASES[name], case=wider(GGUF_CASES[name].case))
    source = resolve(str(save(one, build(one.case), path, quantized=quantized, kind=kind)))
    assert isinstance(source, GgufSource)
    return source


# fused, reordered, joined and transposed tensors; experts, latent attention, several names for the vocabulary
LAYOUTS = ["phi3", "bloom", "falcon-40b", "gpt2", "gptneox", "mpt", "baichuan", "gemma2", "internlm2", "stablelm"]
LAYOUTS += ["gemma4", "gemma4-experts"]
EXPERTS = ["qwen2moe", "granitemoe", "gpt-oss", "glm4moe", "deepseek2-v3", "deepseek2-v3-older", "step35"]


@pytest.mark.parametrize("name", [*LAYOUTS, *EXPERTS])
def test_an_architecture_gives_the_logits_of_its_expanded_file(name: str, tmp_path: Path) -> None:
    source = save_case(name, tmp_path / "model.gguf")

    model = model_of(packed(source))

    assert isinstance(model.pre_post_weight.embedding.method, QuantizedLinear)
    assert_same_logits(source, logits_of(model))


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_stay_packed(name: str, tmp_path: Path) -> None:
    model = model_of(packed(save_case(name, tmp_path / "model.gguf")), is_dummy=True)

    assert isinstance(layer_of(model, -1).ffn.experts.method, QuantizedExperts)


@pytest.mark.parametrize("name", ["qwen3moe", "granitemoe", "gpt-oss"])
def test_ranks_have_their_units_of_packed_experts(name: str, tmp_path: Path) -> None:
    source = packed(save_case(name, tmp_path / "model.gguf"))
    whole, first, second = (
        layer_of(model_of(source, RankGroup(rank, size)), -1).ffn.experts.method
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )

    assert torch.equal(whole.w13.dequantize(), torch.cat([part.w13.dequantize() for part in (first, second)], dim=1))
    assert torch.equal(whole.w2.dequantize(), torch.cat([part.w2.dequantize() for part in (first, second)], dim=2))


def test_experts_in_4_bit_floats_stay_so(tmp_path: Path) -> None:
    """As in the files of gpt-oss."""
    source = save_case("gpt-oss", tmp_path / "model.gguf", "exps.weight", GGMLQuantizationType.MXFP4)

    model = model_of(packed(source))

    assert isinstance(layer_of(model, 0).ffn.experts.method.w13, ops.Mxfp4Weight)
    assert_same_logits(source, logits_of(model))


@pytest.mark.skipif(library is None, reason="the C library was not built")
@pytest.mark.parametrize("name", ["qwen2moe", "gpt-oss"])
def test_the_c_library_multiplies_with_packed_experts(name: str, tmp_path: Path) -> None:
    source = save_case(name, tmp_path / "model.gguf")
    expected = logits_of(model_of(source))

    ops.use_backend(BACKEND, "cpu")
    model = model_of(packed(source))
    logits = logits_of(model)

    assert isinstance(layer_of(model, -1).ffn.experts.method.w13, PackedExperts)
    assert (logits - expected).abs().max() < 2e-3 * expected.abs().max()


@pytest.mark.parametrize("quantized", ["ffn_(gate|down)_exps", "ffn_(gate|up)_exps"])
def test_experts_of_which_a_part_is_not_packed_are_expanded(quantized: str, tmp_path: Path) -> None:
    source = save_case("qwen3moe", tmp_path / "model.gguf", quantized=f"{quantized}|attn")

    model = model_of(packed(source))

    assert isinstance(layer_of(model, 0).qkv_proj.method, QuantizedLinear)
    assert not isinstance(layer_of(model, 0).ffn.experts.method, QuantizedExperts)
    assert_same_logits(source, logits_of(model))


def test_shared_experts_of_another_type_are_apart(tmp_path: Path) -> None:
    source = save_case("deepseek2-v3", tmp_path / "model.gguf", quantized="exps|token_embd")

    model = model_of(packed(source))

    assert layer_of(model, -1).ffn.shared is not None
    assert_same_logits(source, logits_of(model))


def test_a_tensor_that_joins_two_types_is_expanded(tmp_path: Path) -> None:
    source = save_case("baichuan", tmp_path / "model.gguf", quantized="attn_[qk]|attn_output|output.weight")

    model = model_of(packed(source))

    assert isinstance(layer_of(model, 0).qkv_proj.method, UnquantizedLinear)
    assert isinstance(layer_of(model, 0).o_proj.method, QuantizedLinear)
    assert isinstance(model.pre_post_weight.lm_head.method, UnquantizedLinear)  # Baichuan 2 changes its values
    assert_same_logits(source, logits_of(model))


@pytest.mark.parametrize("is_packed", [True, False])
def test_metadata_is_that_of_the_tensors(is_packed: bool, tmp_path: Path) -> None:
    source = replace(save_llama(tmp_path / "model.gguf", mixed), is_packed=is_packed)

    declared = [(name, tensor.shape, tensor.dtype) for name, tensor, _ in tensor_metadata(source)]
    found = list(open_checkpoint(source))

    assert declared == [(name, tensor.shape, tensor.dtype) for name, tensor, _ in found]
    assert total_bytes(source) == sum(tensor.nbytes for _, tensor, _ in found)
    assert any(dtype is torch.uint8 for _, _, dtype in declared) == is_packed


def test_a_file_of_another_size_than_its_metadata_is_refused(tmp_path: Path) -> None:
    source = packed(save_llama(tmp_path / "model.gguf", lambda _: "Q8_0"))
    entry = source.header.tensors["blk.1.ffn_down.weight"]
    source.header.tensors[entry.name] = entry._replace(shape=(256, 256))

    with pytest.raises(CheckpointError, match=r"layers.1.mlp.down_proj.weight has shape \(256, 272\).*\(256, 544\)"):
        model_of(source)


def test_the_config_names_types_and_bits(tmp_path: Path) -> None:
    source = packed(save_llama(tmp_path / "model.gguf", mixed, is_tied=False))

    text = str(ModelConfig.from_hf(source.hf_config()).quantization)

    assert text == "GGUF Q4_K, Q6_K, packed: 5.4 bits a weight in the file, 7.8 in memory"


@pytest.mark.parametrize(
    ("quantization", "packed_by_default", "is_packed"),
    [
        (None, False, False),
        (None, True, True),
        ("gguf", False, True),
        ("none", True, False),
        ("int8", True, False),  # the expanded weights are quantised again
    ],
)
def test_the_operator_or_the_device_decides_whether_blocks_stay_packed(
    quantization: str | None, packed_by_default: bool, is_packed: bool, tmp_path: Path
) -> None:
    source = stored_as(save_llama(tmp_path / "model.gguf", mixed), quantization, packed_by_default)

    config = read_model_config(source.hf_config(), None, quantization)

    kind = GgufQuantConfig if is_packed else OnLoadConfig if quantization == "int8" else type(None)
    assert isinstance(config.quantization, kind)


def test_a_worker_says_how_a_gguf_file_is_computed(tmp_path: Path) -> None:
    path = save_llama(tmp_path / "model.gguf", lambda _: "Q4_0").path
    config = WorkerConfig(model_dir=str(path), device="cpu", quantization="gguf", max_total_token_num=128)

    worker = ModelWorker(config, resolve(str(path)), Parallel())

    expected = "GGUF Q4_0, packed: 4.5 bits a weight in the file, 5.0 in memory"
    assert expected in worker.dtype_and_device


@pytest.mark.parametrize(("has_library", "deterministic"), [(True, False), (False, False), (True, True)])
def test_a_gguf_file_stays_packed_where_products_with_it_are_fast(
    has_library: bool, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "_has_library", lambda self: has_library)
    path = save_llama(tmp_path / "model.gguf", lambda _: "Q4_0").path
    config = WorkerConfig(model_dir=str(path), device="cpu", deterministic=deterministic, max_total_token_num=128)

    worker = ModelWorker(config, resolve(str(path)), Parallel())

    assert ("packed" in worker.dtype_and_device) == has_library


def test_a_choice_by_module_expands_a_file_that_would_stay_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "_has_library", lambda self: True)
    path = save_llama(tmp_path / "model.gguf", lambda _: "Q4_0").path
    choices = tmp_path / "choices.json"
    choices.write_text('{"default": "int8"}')
    config = WorkerConfig(model_dir=str(path), device="cpu", quantization_config=str(choices), max_total_token_num=128)

    worker = ModelWorker(config, resolve(str(path)), Parallel())

    assert "int8" in worker.dtype_and_device
    assert "GGUF" not in worker.dtype_and_device
