"""A second way to store linears needs a LinearMethod and a line in its registry, and no change in a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from lightserve.common.basemodel import (
    CheckpointTensor,
    LinearMethod,
    LinearSpec,
    ModelArgs,
    ModelConfig,
    Parallel,
    Piece,
    RankGroup,
    TpPartBaseModel,
    UnquantizedLinear,
)
from lightserve.common.parallel import ParallelSizes, connect_ranks
from lightserve.common.quantization import LinearMethodFactory, registry
from lightserve.errors import CheckpointError
from lightserve.model_files import model_config
from lightserve.models.registry import get_model_class
from test.models.session import Session
from test.models.tiny import build_hf, build_ours, checkpoint_of

NAME = "toy_int8"
MODELS = ["llama-biased", "qwen2-one-kv-head"]
PROMPTS = [[5, 17, 3, 99, 42, 8, 1], [77, 2, 130], [64]]
ONE_RANK = RankGroup()


class Int8Linear(LinearMethod):
    """Weight-only int8: codes ``[out, in]`` and one scale per output row."""

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self.codes = torch.empty(spec.out_size, spec.num_columns, dtype=torch.int8, device=device)
        self.scales = torch.empty(spec.out_size, dtype=torch.float32, device=device)
        self.bias = torch.empty(spec.out_size, dtype=dtype, device=device) if spec.has_bias else None
        self.weight: Tensor | None = None

    def pieces(self) -> Iterator[Piece]:
        begin = 0
        for part in self._spec.parts:
            own = slice(begin, begin + part.num_rows)
            yield self._codes_piece(part.prefix, part.out_size, part.rows, own)
            yield Piece(f"{part.prefix}.weight_scale", (part.out_size,), self.scales[own], _cut(part.rows))
            if self.bias is not None:
                bias = self.bias[own] if self._spec.adds_bias else None
                yield Piece(f"{part.prefix}.bias", (part.out_size,), bias, _cut(part.rows))
            begin = own.stop

    def _codes_piece(self, prefix: str, out_size: int, rows: slice | Tensor, own: slice) -> Piece:
        shape = (out_size, self._spec.in_size)
        return Piece(f"{prefix}.weight", shape, self.codes[own], _cut(rows, self._spec.columns), (torch.int8,))

    def process_weights_after_loading(self) -> None:
        self.weight = self.codes.float() * self.scales[:, None]

    def mm(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        out = x @ self.weight.to(x.dtype).T
        return out + self.bias if self.bias is not None and self._spec.adds_bias else out


def _cut(*slices: slice | Tensor) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[slices]


def int8_factory(config: Mapping[str, Any]) -> LinearMethodFactory:
    def make(spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> LinearMethod:
        return (UnquantizedLinear if spec.is_vocab else Int8Linear)(spec, dtype, device)

    return make


@pytest.fixture(autouse=True)
def _toy_format() -> Iterator[None]:
    register()
    yield
    del registry.METHODS[NAME]
    model_config.QUANT_METHODS.remove(NAME)


def register() -> None:
    registry.METHODS[NAME] = int8_factory
    model_config.QUANT_METHODS.add(NAME)


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

    assert isinstance(ours.layer_weights[0].o_proj.method, Int8Linear)
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
    spawn(_run_rank, args=(2, str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]

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
