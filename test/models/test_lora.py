"""Requests with different adapters, in one batch, have the logits of models into which the adapters are merged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, CohereConfig, GPT2Config, Phi3Config

from lightserve.common import (
    cpu_kernel,  # noqa: F401  registers its backend
    ops,
)
from lightserve.common.basemodel import LoraArgs, ModelArgs, ModelConfig, TpPartBaseModel
from lightserve.common.device import device_named
from lightserve.common.parallel import Parallel, ParallelSizes, RankGroup, connect_ranks
from lightserve.errors import AdapterError
from lightserve.model_files.lora.adapter import read_adapter
from lightserve.models.registry import get_model_class, read_model_config
from lightserve.worker.lora import write_groups
from test.lora_files import LLAMA_TARGETS, add_to, linear_sizes, save_adapter, write_adapter
from test.models import test_packed_formats
from test.models.session import Session
from test.models.tiny import HF_CONFIGS, MAX_LEN, NUM_SLOTS, SMALL, build_hf, checkpoint_of, hf_logits
from test.ranks import run_ranks

PROMPTS = [[5, 17, 3, 99, 42, 8, 1, 77, 23], [77, 2, 130, 6], [64], [5, 17, 3, 99, 42, 8, 1, 77, 23]]
NEXT = [[11], [12, 13], [14, 15, 16], [17]]
SLOTS = [1, ops.NO_LORA, 0, 0]  # of the requests
NUM_LORAS, RANK = 3, 16

OTHER_CONFIGS: dict[str, Callable[[], Any]] = {
    # q, k and v as one linear, and gate and up
    "phi3": lambda: Phi3Config(
        **SMALL, num_key_value_heads=2, pad_token_id=0, original_max_position_embeddings=MAX_LEN
    ),
    # neighbouring rows rotate together, layers are parallel
    "cohere": lambda: CohereConfig(**SMALL, num_key_value_heads=2),
    # linears are stored as [in, out]
    "gpt2": lambda: GPT2Config(vocab_size=131, n_embd=64, n_layer=2, n_head=4, n_positions=MAX_LEN),
}
TARGETS = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "bloom-8-heads": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
}
MODELS = ["llama-gqa", "llama-biased", "qwen2-one-kv-head", "qwen3", "bloom-8-heads", *OTHER_CONFIGS]


def build_base(name: str) -> Any:
    if name in HF_CONFIGS:
        return build_hf(name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(OTHER_CONFIGS[name]()).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.15)
    return model


def sizes_of(hf: Any, name: str) -> dict[str, tuple[int, int]]:
    sizes = linear_sizes(hf, TARGETS.get(name, LLAMA_TARGETS))
    return {module: size[::-1] for module, size in sizes.items()} if name == "gpt2" else sizes


def write_two(hf: Any, name: str, folder: Path) -> list[Path]:
    """Of different ranks, and one with rslora."""
    sizes = sizes_of(hf, name)
    return [
        write_adapter(folder / "one", sizes, seed=1, rank=4),
        write_adapter(folder / "two", sizes, seed=2, rank=7, use_rslora=True),
    ]


def merged_model(hf: Any, folder: Path, name: str) -> Any:
    model = copy.deepcopy(hf)
    if name != "gpt2":
        add_to(model, folder)
        return model
    for parameter in model.parameters():  # the delta is [out, in]
        parameter.data = parameter.data.T.contiguous() if parameter.ndim == 2 else parameter.data
    add_to(model, folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.T.contiguous() if parameter.ndim == 2 else parameter.data
    return model


def build(hf: Any, folders: list[Path], tp: RankGroup | None = None, **changes: Any) -> TpPartBaseModel:
    """Ours with the adapters in slots 0, 1, ..."""
    args = ModelArgs(
        config=ModelConfig.from_hf(hf.config.to_dict()),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=Parallel(tp=tp or RankGroup()),
        checkpoint=checkpoint_of(hf),
        max_total_token_num=NUM_SLOTS,
        max_reqs=8,
        max_req_total_len=MAX_LEN,
        lora=LoraArgs(NUM_LORAS, RANK, tuple(map(read_adapter, folders))),
    )
    args = replace(args, **changes)
    model = get_model_class(args.config.model_type)(args)
    for slot, folder in enumerate(folders):
        assert model.lora is not None
        block = torch.empty(model.lora.block_size, dtype=model.lora.dtype)
        model.lora.fill(block, model.check_adapter(read_adapter(folder)))
        model.lora.put(slot, block)
    return model


class LoraSession(Session):
    def run(self, new_tokens: dict[int, list[int]], slots: list[int]) -> Tensor:
        """``slots``: of the request in each row."""
        step = self.input_of(new_tokens)
        of_tokens = [slots[row] for row, tokens in new_tokens.items() for _ in tokens]
        size = ops.lora_group_rows(len(of_tokens))
        rows = np.zeros(len(of_tokens), dtype=np.int32)
        groups = np.full((3, ops.max_lora_groups(len(of_tokens), NUM_LORAS, size)), ops.NO_LORA, dtype=np.int32)
        write_groups(rows, groups, of_tokens, len(of_tokens))
        lora = ops.LoraRows(torch.from_numpy(rows), torch.from_numpy(groups), size)
        return self.model.forward(replace(step, lora=lora)).cpu()


def our_logits(model: TpPartBaseModel) -> Tensor:
    """Prompts in two chunks, then a mixed step, in which the first request's twin has a cached prefix."""
    session = LoraSession(model)
    session.run({0: PROMPTS[0][:4], 1: PROMPTS[1][:3]}, SLOTS)
    first = session.run({0: PROMPTS[0][4:], 1: PROMPTS[1][3:], 2: PROMPTS[2], 3: PROMPTS[3]}, SLOTS)
    second = session.run(dict(enumerate(NEXT)), SLOTS)
    session.share_prefix(2, 4, 3)
    third = session.run({4: [*PROMPTS[2], *NEXT[2]][3:], 0: [18]}, [*SLOTS, 0])
    return torch.cat([first, second, third])


def expected_logits(hf: Any, folders: list[Path], name: str) -> Tensor:
    models = [merged_model(hf, folder, name) for folder in folders] + [hf]
    whole = [prompt + following for prompt, following in zip(PROMPTS, NEXT, strict=True)]
    sequences = [
        *zip(PROMPTS, SLOTS, strict=True),
        *zip(whole, SLOTS, strict=True),
        (whole[2], 0),
        ([*whole[0], 18], 1),
    ]
    return torch.cat([hf_logits(models[slot], [ids]) for ids, slot in sequences])


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_two_adapters_and_none_in_one_batch_equal_three_merged_models(name: str, tmp_path: Path) -> None:
    hf = build_base(name)
    folders = write_two(hf, name, tmp_path)

    ours = our_logits(build(hf, folders))

    theirs = expected_logits(hf, folders, name)
    assert_same(ours, theirs)
    assert (hf_logits(hf, PROMPTS[:1]) - theirs[:1]).abs().max() > 0.05 * theirs.abs().max()  # the adapters matter


def test_a_step_without_adapters_gives_the_base_models_logits(tmp_path: Path) -> None:
    hf = build_base("llama-gqa")
    session = Session(build(hf, write_two(hf, "llama-gqa", tmp_path)))

    assert_same(session.step(dict(enumerate(PROMPTS))), hf_logits(hf, PROMPTS))


def test_a_norm_and_the_linear_with_adapters_behind_it_are_one_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = build_base("llama-gqa")
    session = LoraSession(build(hf, write_two(hf, "llama-gqa", tmp_path)))
    with_norm: list[int] = []
    reference = ops.add_rms_norm_lora_linear.impls[ops.REFERENCE]

    def counting(x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, layer: ops.LoraLinear) -> Any:
        with_norm.append(layer.lora.num_parts)
        return reference(x, residual, norm_weight, eps, layer)

    monkeypatch.setattr(ops.add_rms_norm_lora_linear, "_active", counting)

    session.run({0: PROMPTS[0]}, SLOTS)

    assert with_norm == [2, 3, 2]  # gate, up; q, k, v; gate, up: the first norm of a model has nothing to add


@pytest.mark.parametrize("scheme", ["fp8", "int8", "w4"])
def test_adapters_add_to_a_quantised_base(scheme: str, tmp_path: Path) -> None:
    """The same as on the unquantised model, but for what the base's rounding changes."""
    hf = build_base("llama-gqa")
    folders = write_two(hf, "llama-gqa", tmp_path)
    config = read_model_config(hf.config.to_dict(), None, scheme)

    ours = our_logits(build(hf, folders, config=config))

    similarity = torch.nn.functional.cosine_similarity
    assert similarity(ours, expected_logits(hf, folders, "llama-gqa")).min() > 0.98
    assert similarity(ours[:1], hf_logits(hf, PROMPTS[:1])).min() < 0.9


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-act-order", "gptq-dynamic", "pack-quantized", "nf4", "bnb-int8"])
def test_adapters_on_a_quantised_checkpoint_equal_models_merged_with_what_its_codes_stand_for(
    name: str, tmp_path: Path
) -> None:
    hf, case = test_packed_formats.build_hf(), test_packed_formats.CASES[name]
    checkpoint = test_packed_formats.pack(hf, case)
    folders = write_two(hf, name, tmp_path)
    config = ModelConfig.from_hf({**hf.config.to_dict(), "quantization_config": case.config})

    ours = our_logits(build(hf, folders, config=config, checkpoint=checkpoint))

    theirs = expected_logits(hf, folders, name)
    assert_same(ours, theirs)
    assert (hf_logits(hf, PROMPTS[:1]) - theirs[:1]).abs().max() > 0.05 * theirs.abs().max()  # the adapters matter


def _run_rank(rank: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    device_named("cpu").bind(torch.device("cpu"))
    tp = connect_ranks(rank, ParallelSizes(tp=2), f"file://{store}", "gloo").tp
    for name in ("llama-gqa", "qwen2-one-kv-head", "bloom-8-heads"):
        hf, root = build_base(name), Path(folder, name)
        logits = our_logits(build(hf, [root / "one", root / "two"], tp))
        torch.save(logits, root / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.tp
@pytest.mark.slow
def test_two_ranks_give_the_logits_of_merged_models(tmp_path: Path) -> None:
    names = ("llama-gqa", "qwen2-one-kv-head", "bloom-8-heads")
    bases = {name: build_base(name) for name in names}
    folders = {name: write_two(hf, name, tmp_path / name) for name, hf in bases.items()}

    run_ranks(_run_rank, 2, str(tmp_path / "store"), str(tmp_path))

    for name, hf in bases.items():
        theirs = expected_logits(hf, folders[name], name)
        for rank in range(2):
            assert_same(torch.load(tmp_path / name / f"{rank}.pt", weights_only=True), theirs)


def test_an_adapter_of_keys_is_scaled_with_keys_that_an_8_bit_cache_divides(tmp_path: Path) -> None:
    hf = build_hf("qwen2-tied")
    for layer in hf.model.layers:
        layer.self_attn.k_proj.bias.data[3] = 300.0
    folders = write_two(hf, "qwen2-tied", tmp_path)

    ours = our_logits(build(hf, folders, kv_dtype="int8"))

    theirs = expected_logits(hf, folders, "qwen2-tied")
    assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.99


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_an_adapter_is_merged_while_the_weights_are_loaded(name: str, tmp_path: Path) -> None:
    hf = build_base(name)
    folder = write_two(hf, name, tmp_path)[1]

    model = build(hf, [], lora=None, merged_adapter=read_adapter(folder))

    assert_same(Session(model).step(dict(enumerate(PROMPTS))), hf_logits(merged_model(hf, folder, name), PROMPTS))


def test_a_pipeline_stage_merges_an_adapter_into_its_own_layers(tmp_path: Path) -> None:
    hf = build_base("llama-gqa")
    adapter = read_adapter(write_two(hf, "llama-gqa", tmp_path)[1])
    whole = _weights(build(hf, [], lora=None, merged_adapter=adapter))

    for rank in range(2):
        stage = build(hf, [], lora=None, merged_adapter=adapter, parallel=Parallel(pp=RankGroup(rank, 2)))
        for name, tensor in _weights(stage).items():
            assert torch.equal(tensor, whole[name]), name


def _weights(model: TpPartBaseModel) -> dict[str, torch.Tensor]:
    pieces = (piece for layer in (model.pre_post_weight, *model.layer_weights) for piece in layer.pieces())
    return {piece.name: piece.into for piece in pieces if piece.into is not None}


def test_adapters_of_the_head_and_the_embedding_are_merged(tmp_path: Path) -> None:
    hf = build_base("llama-gqa")
    a, b = torch.randn(2, 131), torch.randn(64, 2)
    head_a, head_b = torch.randn(2, 64), torch.randn(131, 2)
    tensors = {
        "base_model.model.model.embed_tokens.lora_embedding_A": a,
        "base_model.model.model.embed_tokens.lora_embedding_B": b,
        "base_model.model.lm_head.lora_A.weight": head_a,
        "base_model.model.lm_head.lora_B.weight": head_b,
    }
    folder = save_adapter(tmp_path, tensors, r=2, lora_alpha=1)

    model = build(hf, [], lora=None, merged_adapter=read_adapter(folder))

    hf.model.embed_tokens.weight.data += 0.5 * (b @ a).T
    hf.lm_head.weight.data += 0.5 * (head_b @ head_a)
    assert_same(Session(model).step(dict(enumerate(PROMPTS))), hf_logits(hf, PROMPTS))


@pytest.mark.parametrize("is_merged", [False, True])
def test_an_adapter_for_another_model_is_refused_before_weights_load(is_merged: bool, tmp_path: Path) -> None:
    hf = build_base("llama-gqa")
    sizes = sizes_of(hf, "llama-gqa")
    name = "model.layers.1.self_attn.k_proj"
    folder = write_adapter(tmp_path, {**sizes, name: (32, 64)})
    adapter = read_adapter(folder)
    changes: dict[str, Any] = {"lora": LoraArgs(1, 16, (adapter,))}
    if is_merged:
        changes = {"lora": None, "merged_adapter": adapter}

    def unread() -> Any:
        raise AssertionError("the weights were read")
        yield

    with pytest.raises(
        AdapterError, match=f"{name} is for a linear of 64 inputs and 32 outputs; the model's has 64 and 16"
    ):
        build(hf, [], checkpoint=unread(), **changes)


def test_an_adapter_of_the_head_is_refused_at_run_time(tmp_path: Path) -> None:
    hf = build_base("llama-gqa")
    folder = write_adapter(tmp_path, {"lm_head": (131, 64)})

    with pytest.raises(AdapterError, match="lm_head takes no adapter at run time; use --merge_lora"):
        build(hf, [folder])
