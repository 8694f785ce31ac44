"""A GGUF file of every architecture gives the logits of the transformers model that it was written from."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightserve.common.checkpoint.reader import open_checkpoint
from lightserve.model_files import resolve
from lightserve.model_files.gguf.architectures import ARCHITECTURES
from lightserve.models.registry import MODELS
from test.models.architectures import converted
from test.models.architectures.case import MAX_LEN, Json, Tensors, build, hf_logits
from test.models.architectures.dense_a import CASES, WINDOW
from test.models.gguf_cases import GGUF_CASES
from test.models.gguf_converter import save
from test.models.session import Session
from test.models.test_architectures import PROMPT
from test.models.tiny import build_model
from test.pooling.test_gguf_encoders import ENCODERS


@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_gguf_file_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    tiny = build(GGUF_CASES[name].case)
    source = resolve(str(save(GGUF_CASES[name], tiny, tmp_path / "model.gguf")))

    model = build_model(source.hf_config(), open_checkpoint(source), max_len=MAX_LEN)
    ours = Session(model).step({0: PROMPT})[0]

    theirs = hf_logits(tiny.hf, PROMPT)[-1]
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_layers_that_predict_more_tokens_are_skipped(tmp_path: Path) -> None:
    def add_layer(tensors: Tensors, config: Json) -> Tensors:
        return tensors | {"blk.3.nextn.eh_proj.weight": torch.ones(4, 4), "blk.3.attn_norm.weight": torch.ones(48)}

    one = GGUF_CASES["glm4moe"]
    one, tiny = replace(one, steps=(*one.steps, add_layer)), build(one.case)

    source = resolve(str(save(one, tiny, tmp_path / "model.gguf", {"block_count": 4, "nextn_predict_layers": 1})))

    assert source.hf_config()["num_hidden_layers"] == 3
    assert {name for name, _, _ in open_checkpoint(source)} == set(tiny.tensors)


def test_a_window_in_a_llama_file_makes_it_a_mistral(tmp_path: Path) -> None:
    tiny = build(CASES["mistral"])
    path = save(GGUF_CASES["llama"], tiny, tmp_path / "model.gguf", {"attention.sliding_window": WINDOW})
    source = resolve(str(path))

    model = build_model(source.hf_config(), open_checkpoint(source), max_len=MAX_LEN)
    ours = Session(model).step({0: PROMPT})[0]

    theirs = hf_logits(tiny.hf, PROMPT)[-1]
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_the_first_phi2_files_have_q_k_and_v_in_one_tensor(tmp_path: Path) -> None:
    def fuse(tensors: Tensors, config: Json) -> Tensors:
        fused = converted.fused(tensors)
        return {
            re.sub(r"model.layers.(\d+).self_attn.qkv_proj", r"blk.\1.attn_qkv", name): fused[name] for name in fused
        }

    one = GGUF_CASES["phi2"]
    one, tiny = replace(one, steps=(fuse,)), build(one.case)

    source = resolve(str(save(one, tiny, tmp_path / "model.gguf")))
    found = {name: tensor for name, tensor, _ in open_checkpoint(source)}

    assert found.keys() == tiny.tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tiny.tensors.items())


def test_every_gguf_architecture_is_tested_and_is_a_model() -> None:
    encoders = {architecture for architecture, _ in ENCODERS}
    assert {case.architecture for case in GGUF_CASES.values()} | encoders == set(ARCHITECTURES)
    assert {one.model_type for family in ARCHITECTURES.values() for one in family} <= set(MODELS)
