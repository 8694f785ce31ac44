"""The training loop of docs/rl.md against a real server with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmark.grpo import Grpo
from test.api.server import running_server
from test.pooling.files import VOCAB_SIZE, word_tokenizer

pytestmark = pytest.mark.slow


def save_model(folder: Path) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=64, **shape)).save_pretrained(folder)
    word_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("steps", [6, pytest.param(12, marks=pytest.mark.long)])
def test_the_reward_rises(tmp_path: Path, steps: int) -> None:
    (tmp_path / "weights").mkdir()
    model = save_model(tmp_path / "weights" / "first")
    flags: tuple[str, ...] = (
        "--device",
        "cpu",
        "--data_type",
        "float32",
        "--max_total_token_num",
        "4096",
        "--max_req_total_len",
        "64",
    )
    flags += ("--enable_rl", "--weights_dir", str(model.parent))
    with running_server(tmp_path / "log", "--model_dir", str(model), *flags) as server:
        reports = list(Grpo(server.url, str(model), str(model.parent)).train(steps))

    rewards = [report.reward for report in reports]
    assert [report.version for report in reports] == ["default", *(f"step-{step}" for step in range(1, steps))]
    assert max(report.logprob_error for report in reports) < 1e-2  # the server has the trainer's weights
    assert rewards[-1] > rewards[0] + 0.02 * (steps - 1), rewards
