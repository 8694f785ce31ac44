"""Whole models on the Triton kernels without a GPU. On a GPU test_parity.py runs the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import TpPartBaseModel
from lightserve.common.device.profile import H200
from lightserve.common.triton_kernel import _gpu
from lightserve.common.triton_kernel.linear import _tiled_int4, norm_linear
from test.models import test_packed_formats as packed_formats
from test.models.architectures.case import build
from test.models.architectures.hybrid import CASES
from test.models.session import Session
from test.models.test_parity import ON_GPU, PROMPTS, assert_same
from test.models.tiny import build_hf, build_model, build_ours, build_with_kv, hf_logits


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Include the fused norm and linear: it serves bfloat16, which the interpreter cannot multiply.

    Programs run one after the other, also the hundreds for other multiprocessors that end at once.
    """
    monkeypatch.setattr(norm_linear, "DTYPES", (torch.float32,))
    monkeypatch.setattr(_gpu, "active", replace(H200, multiprocessors=12))
    ops.use_backend("triton")
    yield
    ops.use_backend(ops.REFERENCE)


@pytest.mark.slow
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_kernels_with_a_quantised_cache_give_the_logits_of_the_definitions(kv_dtype: str) -> None:
    """The last step reads only codes; a prompt of one step reads none."""
    model = build_with_kv(build_hf("qwen3"), kv_dtype)
    ours = logits_of_steps(model)
    ops.use_backend(ops.REFERENCE)

    expected = logits_of_steps(model)

    for found, wanted in zip(ours, expected, strict=True):
        assert (found - wanted).abs().max() <= 0.05 * wanted.abs().max()


def logits_of_steps(model: TpPartBaseModel) -> list[Tensor]:
    session = Session(model)
    return [session.step({0: PROMPTS[0][:5]}), session.step({0: PROMPTS[0][5:]}), session.step({0: [7]})]


@pytest.mark.slow
@pytest.mark.usefixtures("_kernels")
@pytest.mark.skipif(ON_GPU, reason="test_parity.py runs the kernels there")
@pytest.mark.parametrize("name", ["llama-gqa", "bloom-12-heads"])
def test_kernels_in_the_interpreter_give_the_logits_of_transformers(name: str) -> None:
    hf = build_hf(name)
    session = Session(build_ours(hf))
    session.step({0: PROMPTS[0][:5], 1: PROMPTS[1]})

    mixed = session.step({0: PROMPTS[0][5:], 1: [9]})
    decode = session.step({0: [7], 1: [8]})

    assert_same(mixed, hf_logits(hf, [PROMPTS[0], [*PROMPTS[1], 9]]))
    assert_same(decode, hf_logits(hf, [[*PROMPTS[0], 7], [*PROMPTS[1], 9, 8]]))


@pytest.mark.slow
@pytest.mark.usefixtures("_kernels")
@pytest.mark.skipif(ON_GPU, reason="test_architectures.py runs the kernels there")
@pytest.mark.parametrize(
    "name",
    [  # one with each kind of state; test/ops/state interprets every kernel of them
        *("falcon_h1-norm", "lfm2", "qwen3_5_text"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("kimi_linear", "minimax", "nemotron_h-experts")),
    ],
)
def test_kernels_of_recurrent_layers_give_the_logits_of_transformers(name: str) -> None:
    tiny = build(CASES[name])
    session = Session(build_model(tiny.config_json, tiny.checkpoint()))
    session.step({0: PROMPTS[0][:5], 1: PROMPTS[1]})

    mixed = session.step({0: PROMPTS[0][5:], 1: [9]})
    decode = session.step({0: [7], 1: [8]})

    assert_same(mixed, hf_logits(tiny.hf, [PROMPTS[0], [*PROMPTS[1], 9]]))
    assert_same(decode, hf_logits(tiny.hf, [[*PROMPTS[0], 7], [*PROMPTS[1], 9, 8]]))


@pytest.mark.slow
@pytest.mark.usefixtures("_kernels")
@pytest.mark.skipif(ON_GPU, reason="test_parity.py runs the kernels there")
def test_tiles_of_a_gptq_checkpoint_give_the_logits_of_the_dequantised_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU for which kernels may hold assembly."""
    monkeypatch.setattr(_tiled_int4, "uses_asm", lambda: True)
    hf, case = packed_formats.build_hf(), packed_formats.CASES["gptq-v2"]
    model = packed_formats.build(hf, case, packed_formats.pack(hf, case))

    ours = packed_formats.logits_of(model)

    method = model.layer_weights[0].o_proj.method
    assert isinstance(getattr(method, "weight", None), _tiled_int4.TiledInt4Weight)
    ops.use_backend(ops.REFERENCE)
    packed_formats.assert_same(ours, packed_formats.logits_of(build_ours(hf)))
