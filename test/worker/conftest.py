from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a tiny Llama without a tokenizer."""
    from test.models.tiny import build_hf  # transformers begins here

    path = tmp_path_factory.mktemp("tiny-llama")
    build_hf("llama-gqa").save_pretrained(path)
    return str(path)
