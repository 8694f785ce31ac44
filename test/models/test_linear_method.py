"""A new format of linears needs a scheme, a WeightFormat and their registration, and no change in a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightserve.common.basemodel import CheckpointTensor, ModelArgs, ModelConfig, Parallel, RankGroup, TpPartBaseModel
from lightserve.common.ops import Int8Weight, QuantizedWeight
from lightserve.common.parallel import ParallelSizes, connect_ranks
from lightserve.common.quantization import QuantizedLinear
from lightserve.common.quantization.weight_format import FORMATS, RawTensor, WeightFormat
from lightserve.errors import CheckpointError
from lightserve.model_files.quantization import QuantConfig, Scheme
from lightserve.model_files.quantization.quant_config import PARSERS
from lightserve.models.registry import get_model_class
from test.models.session import Session
from test.models.tiny import build_hf, build_ours, checkpoint_of
from test.ranks import run_ranks

NAME = "toy_int8"
MODELS = ["llama-biased", "qwen2-one-kv-head"]
PROMPTS = [[5, 17, 3, 99, 42, 8, 1], [77, 2, 130], [64]]
ONE_RANK = RankGroup()


@dataclass(frozen=True)
class ToyScheme(Scheme):
    pass


class ToyConfig(QuantConfig):
    def scheme_of(self, module: str) -> Scheme | None:
        return ToyScheme() if ".layers." in module else None

    def __str__(self) -> str:
        return "toy"


class ToyFormat(WeightFormat):
    """Codes ``[out, in]`` and one scale per output row."""

    def __init__(self, scheme: ToyScheme) -> None: ...

    def raw_tensors(self, out_size: int, in_size: int) -> dict[str, RawTensor]:
        return {"weight": RawTensor((out_size, in_size), (torch.int8,)), "weight_scale": RawTensor((out_size,))}

    def convert(self, raw: Mapping[str, Tensor]) -> QuantizedWeight:
        return Int8Weight(codes=raw["weight"], scales=raw["weight_scale"].float()[:, None])

    def empty(self, shape: tuple[int, ...], group_size: int, device: torch.device) -> QuantizedWeight:
        return Int8Weight.empty(shape, group_size, device)


@pytest.fixture(autouse=True)
def _toy_format() -> Iterator[None]:
    register()
    yield
    del PARSERS[NAME]
    del FORMATS[ToyScheme]


def register() -> None:
    PARSERS[NAME] = lambda table: ToyConfig()
    FORMATS[ToyScheme] = ToyFormat


def quantized(hf: Any) -> list[CheckpointTensor]:
    """The checkpoint of ``hf`` in int8; the weights of ``hf`` become those that the codes stand for."""
    tensors: list[CheckpointTensor] = []
    for name, tensor, file in checkpoint_of(hf):
        if ".layers." not in name or tensor.ndim != 2:
            tensors.append(CheckpointTensor(name, tensor, file))
            continue
        scales = tensor.abs().amax(1) / 127
        codes = (tensor / scales[:, None]).round().to(torch.int8)
        tensor.copy_(codes.float() * scales[:, None])
        tensors += [CheckpointTensor(name, codes, file), CheckpointTensor(f"{name}_scale", scales, file)]
    return tensors


def build_int8(hf: Any, checkpoint: list[CheckpointTensor] | None, tp: RankGroup = ONE_RANK) -> TpPartBaseModel:
    config = ModelConfig.from_hf({**hf.config.to_dict(), "quantization_config": {"quant_method": NAME}})
    args = ModelArgs(config, torch.float32, torch.device("cpu"), Parallel(tp=tp), checkpoint, 512, 8, 128)
    return get_model_class(config.model_type)(args)


def logits_of(model: TpPartBaseModel) -> Tensor:
    session = Session(model)
    prefill = session.step(dict(enumerate(PROMPTS)))
    return torch.cat([prefill, session.step({0: [11], 1: [12, 13], 2: [14]})])


@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_model_gives_the_logits_of_the_dequantised_one(name: str) -> None:
    hf = build_hf(name)
    checkpoint = quantized(hf)

    ours = build_int8(hf, checkpoint)

    assert isinstance(ours.layer_weights[0].o_proj.method, QuantizedLinear)
    expected = logits_of(build_ours(hf))
    torch.testing.assert_close(logits_of(ours), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def _run_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    register()
    tp = connect_ranks(rank, ParallelSizes(tp=size), f"file://{folder}/store", "gloo").tp
    for name in MODELS:
        hf = build_hf(name)
        torch.save(logits_of(build_int8(hf, quantized(hf), tp)), f"{folder}/{name}.{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.tp
@pytest.mark.slow
def test_ranks_split_codes_and_scales(tmp_path: Path) -> None:
    run_ranks(_run_rank, 2, 2, str(tmp_path))

    for name in MODELS:
        hf = build_hf(name)
        quantized(hf)
        expected = logits_of(build_ours(hf))
        for rank in range(2):
            ours = torch.load(tmp_path / f"{name}.{rank}.pt", weights_only=True)
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_dummy_weights_of_a_quantised_model_give_finite_logits() -> None:
    logits = logits_of(build_int8(build_hf("llama-biased"), None))

    assert logits.isfinite().all()
    assert logits.std() > 0


Change = Callable[[CheckpointTensor], CheckpointTensor | None]
SCALE = "model.layers.1.mlp.down_proj.weight_scale"
CODES = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (SCALE, lambda t: None, rf"lacks 1 tensors: {SCALE}"),
        (SCALE, lambda t: t._replace(tensor=t.tensor[:-1]), rf"memory: {SCALE} has shape \(63,\).*needs \(64,\)"),
        (CODES, lambda t: t._replace(tensor=t.tensor.float()), rf"memory: {CODES} is float32; this model needs int8"),
    ],
    ids=["missing", "misshapen", "mistyped"],
)
def test_a_wrong_piece_of_a_quantised_linear_is_named(name: str, change: Change, message: str) -> None:
    hf = build_hf("llama-gqa")
    changed = [change(tensor) if tensor.name == name else tensor for tensor in quantized(hf)]

    with pytest.raises(CheckpointError, match=message):
        build_int8(hf, [tensor for tensor in changed if tensor is not None])


def test_layers_with_other_linear_methods_are_of_another_kind() -> None:
    hf = build_hf("llama-gqa")
    plain = build_ours(hf)
    quantised = build_int8(hf, quantized(hf))

    assert plain.layer_weights[0].kernel_key() == plain.layer_weights[1].kernel_key()
    assert plain.layer_weights[0].kernel_key() != quantised.layer_weights[0].kernel_key()
