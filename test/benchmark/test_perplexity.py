"""Perplexity by prompt logprobs, on a tiny model: it is that of transformers' logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from benchmark.engine.perplexity import TEXT, main, measure, windows_of
from lightserve.offline.llm import LLM
from test.models.tiny import build_hf

IDS = [(7 * i * i + 3 * i) % 131 for i in range(50)]


def test_windows_hold_every_token_once_but_no_lone_last_token() -> None:
    assert windows_of(range(5), 2) == [[0, 1], [2, 3]]
    assert windows_of(range(5), 3) == [[0, 1, 2], [3, 4]]


def test_perplexity_is_that_of_the_logits_of_transformers(tmp_path: Path) -> None:
    hf = build_hf("llama-gqa")
    hf.save_pretrained(tmp_path)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    windows = torch.tensor(IDS).view(2, 25)
    with torch.inference_mode():
        logprobs = hf(windows).logits[:, :-1].log_softmax(-1).gather(-1, windows[:, 1:, None])

    found = measure(LLM(str(tmp_path), device="cpu", max_total_token_num=200), IDS, window=25)

    assert found.tokens == 48
    assert found.value == pytest.approx(logprobs.mean().neg().exp().item(), rel=1e-3)


def test_the_text_is_long_enough_for_the_default_number_of_tokens() -> None:
    assert len(TEXT.read_text(encoding="utf-8").split()) > 3500


def test_a_wrong_flag_is_one_line_of_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--window", "1"])

    assert "--window and --tokens must be at least 2" in capsys.readouterr().err
