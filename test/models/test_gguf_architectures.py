"""A GGUF file of every architecture gives the logits of the transformers model that it was written from."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightserve.common.checkpoint.reader import open_checkpoint
from lightserve.model_files import resolve
from lightserve.model_files.gguf_architectures import ARCHITECTURES
from lightserve.models.registry import MODELS
from test.models.architectures.case import MAX_LEN, build, hf_logits
from test.models.gguf_cases import GGUF_CASES
from test.models.gguf_converter import save
from test.models.session import Session
from test.models.test_architectures import PROMPT
from test.models.tiny import build_model


@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_gguf_file_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    tiny = build(GGUF_CASES[name].case)
    source = resolve(str(save(GGUF_CASES[name], tiny, tmp_path / "model.gguf")))

    model = build_model(source.hf_config(), open_checkpoint(source), max_len=MAX_LEN)
    ours = Session(model).step({0: PROMPT})[0]

    theirs = hf_logits(tiny.hf, PROMPT)[-1]
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_every_gguf_architecture_is_tested_and_is_a_model() -> None:
    assert {case.architecture for case in GGUF_CASES.values()} == set(ARCHITECTURES)
    assert {one.model_type for family in ARCHITECTURES.values() for one in family} <= set(MODELS)
