"""gpt-oss with its experts in MXFP4, beside transformers with the weights that transformers dequantises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lightserve.common.ops import Mxfp4Weight
from lightserve.common.parallel import ParallelSizes, RankGroup, connect_ranks
from lightserve.common.quantization import QuantizedExperts
from lightserve.errors import CheckpointError, ModelFilesError
from lightserve.model_files.quantization import Mxfp4Scheme, read_quant_config
from test.models.architectures.case import Case, Tiny, build, hf_logits
from test.models.architectures.moe import CASES
from test.models.session import Session
from test.models.tiny import build_model
from test.ranks import run_ranks

PROMPT = [5, 17, 3, 99, 42, 8, 1, 77, 2]
# as in the config.json of gpt-oss
NOT_CONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
SIZES = {"hidden_size": 96, "intermediate_size": 96}  # two ranks cut a block
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of ``[..., in]``: the nearest codes, two in a byte, the first of them in the low nibble."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(-1) / 4))
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


@cache
def build_mxfp4() -> Tiny:
    """The model of transformers has the dequantised weights."""
    case: Case = CASES["gpt_oss"]
    tiny = build(replace(case, fields={**case.fields, **SIZES}))
    tensors = dict(tiny.tensors)
    parameters = dict(tiny.hf.named_parameters())
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = pack(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameters[name].data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    return Tiny(tiny.hf, {**tiny.config_json, "quantization_config": QUANTIZATION}, tensors)


def logits_of(tiny: Tiny, tp: RankGroup | None = None) -> Tensor:
    session = Session(build_model(tiny.config_json, tiny.checkpoint(), tp or RankGroup()))
    return torch.cat([session.step({0: PROMPT}), session.step({0: [7]})])


def assert_same(ours: Tensor, hf: Any) -> None:
    theirs = hf_logits(hf, [*PROMPT, 7])[-2:]
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_the_logits_are_those_of_transformers_with_dequantised_weights() -> None:
    tiny = build_mxfp4()

    model = build_model(tiny.config_json, tiny.checkpoint())

    method = model.layer_weights[0].ffn.experts.method  # type: ignore[attr-defined]
    assert isinstance(method, QuantizedExperts)
    assert isinstance(method.w13, Mxfp4Weight)
    assert_same(logits_of(tiny), tiny.hf)


def test_every_byte_stands_for_what_transformers_says() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 4, 2, 16)
    scales = torch.tensor([0, 1, 64, 100, 120, 126, 127, 128, 129, 135, 140, 150, 200, 240, 250, 252]).view(2, 4, 2)

    weight = Mxfp4Weight(codes=blocks.flatten(-2), scales=scales.to(torch.uint8))

    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(weight.dequantize(), expected)


def _run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    tp = connect_ranks(rank, ParallelSizes(tp=2), f"file://{folder}/store", "gloo").tp
    tiny = Tiny(None, *torch.load(f"{folder}/tiny.pt", weights_only=True))
    torch.save(logits_of(tiny, tp), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.tp
@pytest.mark.slow
def test_two_ranks_give_the_logits_of_transformers(tmp_path: Path) -> None:
    tiny = build_mxfp4()
    torch.save((tiny.config_json, tiny.tensors), tmp_path / "tiny.pt")

    run_ranks(_run_rank, 2, str(tmp_path))

    for rank in range(2):
        assert_same(torch.load(tmp_path / f"{rank}.pt", weights_only=True), tiny.hf)


def test_ranks_that_cut_a_block_too_small_are_refused() -> None:
    tiny = build_mxfp4()
    config = {**tiny.config_json, "num_attention_heads": 4, "num_key_value_heads": 4}

    with pytest.raises(
        ModelFilesError, match=r"layers.0.mlp.experts: a rank has the inputs 24 to 48, .* into groups of 8; .* use --ep"
    ):
        build_model(config, tiny.checkpoint(), RankGroup(1, 4))


def test_dummy_weights_give_finite_logits() -> None:
    tiny = build_mxfp4()

    model = build_model(tiny.config_json, None)

    logits = Session(model).step({0: PROMPT})
    assert logits.isfinite().all()
    assert logits.std() > 0


PREFIX = "model.layers.1.mlp.experts"
Change = Callable[[Tensor], Tensor | None]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gate_up_proj_scales", lambda t: None, rf"lacks 1 tensors: {PREFIX}.gate_up_proj_scales"),
        ("down_proj_scales", lambda t: t[:, :, :1], r"down_proj_scales has shape \(8, 96, 1\).* needs \(8, 96, 3\)"),
        ("gate_up_proj_blocks", lambda t: t[..., :8], r"blocks has shape \(8, 192, 3, 8\).* needs \(8, 192, 3, 16\)"),
        ("down_proj_blocks", lambda t: t.float(), r"down_proj_blocks is float32; this model needs uint8"),
    ],
)
def test_a_wrong_tensor_is_named(name: str, change: Change, message: str) -> None:
    tiny = build_mxfp4()
    changed = {key: change(t) if key == f"{PREFIX}.{name}" else t for key, t in tiny.tensors.items()}

    with pytest.raises(CheckpointError, match=message):
        build_model(
            tiny.config_json,
            replace(tiny, tensors={key: t for key, t in changed.items() if t is not None}).checkpoint(),
        )


def test_experts_that_are_no_whole_blocks_are_refused() -> None:
    tiny = build_mxfp4()

    with pytest.raises(ModelFilesError, match=r"layers.0.mlp.experts: 80 inputs are no whole groups of 32"):
        build_model({**tiny.config_json, "intermediate_size": 80}, tiny.checkpoint())


@pytest.mark.parametrize(
    ("module", "is_quantized"),
    [
        ("model.layers.3.mlp.experts.gate_up_proj", True),
        ("model.layers.3.mlp.experts.down_proj", True),
        ("model.layers.3.mlp.router", False),
        ("model.layers.3.self_attn.q_proj", False),
        ("lm_head", False),
        ("model.layers.10.mlp.experts.down_proj", False),
        ("model.layers.11.mlp.experts.down_proj", False),
    ],
)
def test_experts_are_quantised_unless_the_config_excepts_them(module: str, is_quantized: bool) -> None:
    config = read_quant_config(
        {**QUANTIZATION, "modules_to_not_convert": [*NOT_CONVERTED, "model.layers.10.mlp", "*.11.mlp.experts"]}
    )

    assert config.scheme_of(module) == (Mxfp4Scheme() if is_quantized else None)


@pytest.mark.parametrize("names", ["lm_head", [3]])
def test_a_bad_list_of_exceptions_is_refused(names: Any) -> None:
    with pytest.raises(ModelFilesError, match=r"modules_to_not_convert .* is not supported; .*; correct it"):
        read_quant_config({**QUANTIZATION, "modules_to_not_convert": names})
