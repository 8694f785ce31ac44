"""A model in a GGUF file gives the logits of the transformers model that it was written from."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightserve.common.checkpoint.reader import open_checkpoint
from lightserve.model_files import resolve
from test.model_files.files import save_as_gguf
from test.models.session import Session
from test.models.test_parity import PROMPTS, assert_same
from test.models.tiny import HF_CONFIGS, build_hf, build_model, hf_logits


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_a_gguf_file_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    hf = build_hf(name)
    source = resolve(str(save_as_gguf(hf, tmp_path / "model.gguf")))

    ours = Session(build_model(source.hf_config(), open_checkpoint(source))).step(dict(enumerate(PROMPTS)))

    assert_same(ours, hf_logits(hf, PROMPTS))
