"""Images that are tiles with texts between them, in an LLM without a server. The oracle is transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightserve import LLM
from lightserve.errors import InvalidRequestError
from test.tiled_model import greedy, save_tiled_model
from test.vision_model import picture


def test_a_chat_about_tiles_has_the_text_of_transformers(tmp_path: Path) -> None:
    path, model, tokenizer = save_tiled_model(tmp_path)
    image = picture(91, 203, 1)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "w40"}]
    expected, prompt_ids = greedy(model, tokenizer, [1, image, 40, 2], 6)

    with LLM(path, device="cpu", max_total_token_num=1000, embed_cache_gb=0.01) as llm:
        (out,) = llm.chat([[{"role": "user", "content": parts}]], max_new_tokens=6, temperature=0.0, ignore_eos=True)
        with pytest.raises(InvalidRequestError, match="the prompt has 2 places for 1 images"):
            llm.chat([[{"role": "user", "content": [*parts, {"type": "text", "text": "<image>"}]}]])

    assert out.prompt_ids == prompt_ids
    assert out.token_ids == expected
