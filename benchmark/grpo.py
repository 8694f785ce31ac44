"""GRPO in one file: a server generates, this process trains, and the reward rises.

    lightserve serve --model_dir MODEL --enable_rl --weights_dir CHECKPOINTS
    python -m benchmark.grpo http://127.0.0.1:8000 MODEL CHECKPOINTS

The reward of an output is the share of its tokens whose ids are in the first quarter of the vocabulary. MODEL is small:
this process computes it in float32 on a CPU.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

PROMPTS, CHOICES, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 16, 8, 12
CLIP = 0.2  # how far a step may move the probability of a token
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Rollouts:
    ids: Tensor  # [rollouts, tokens] int64: prompts and outputs; the choices of a prompt follow one another
    logprobs: Tensor  # [rollouts, output tokens] with which the server sampled them
    rewards: Tensor  # [rollouts]

    @property
    def advantages(self) -> Tensor:
        """How much better than the other choices of its prompt each one is."""
        by_prompt = self.rewards.view(-1, CHOICES)
        centered = by_prompt - by_prompt.mean(1, keepdim=True)
        return (centered / (by_prompt.std(1, keepdim=True) + 1e-4)).flatten()


@dataclass(frozen=True)
class StepReport:
    reward: float  # mean
    logprob_error: float  # how far the logprobs of server and trainer are apart, at most
    version: str  # of the weights that generated


class Grpo:
    def __init__(self, url: str, model_dir: str, checkpoints: str) -> None:
        self._url = url
        self._checkpoints = Path(checkpoints)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._vocab = int(self._model.config.vocab_size)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), LEARNING_RATE, weight_decay=0.0)

    def train(self, steps: int) -> Iterator[StepReport]:
        prompts = torch.randint(3, self._vocab, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
        for step in range(steps):
            rollouts, version = self._generate(prompts, seed=step)
            logprobs = self._logprobs(rollouts.ids)
            ratio = (logprobs - rollouts.logprobs).exp()
            advantages = rollouts.advantages[:, None]
            objective = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            self._optimizer.zero_grad()
            torch.autograd.backward(-objective.mean())
            self._optimizer.step()
            self._update_server(f"step-{step + 1}")
            error = (logprobs.detach() - rollouts.logprobs).abs().max()
            yield StepReport(float(rollouts.rewards.mean()), float(error), version)

    def _generate(self, prompts: Tensor, seed: int) -> tuple[Rollouts, str]:
        sampling = {"n": CHOICES, "max_new_tokens": OUTPUT_TOKENS, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompts.tolist(), "sampling_params": sampling | {"sampling_seed": seed}}
        replies = self._post("/generate", body | {"return_logprob": True})
        entries = torch.tensor(
            [[entry[:2] for entry in reply["meta_info"]["output_token_logprobs"]] for reply in replies]
        )
        outputs = entries[..., 1].long()
        ids = torch.cat((prompts.repeat_interleave(CHOICES, 0), outputs), 1)
        rewards = (outputs < self._vocab // 4).float().mean(1)
        return Rollouts(ids, entries[..., 0], rewards), replies[0]["meta_info"]["weight_version"]

    def _logprobs(self, ids: Tensor) -> Tensor:
        """Of the output tokens."""
        logits = self._model(ids[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]
        logprobs: Tensor = logits.log_softmax(-1).gather(2, ids[:, PROMPT_TOKENS:, None])[..., 0]
        return logprobs

    def _update_server(self, version: str) -> None:
        self._model.save_pretrained(self._checkpoints / version)
        self._post("/update_weights_from_disk", {"model_path": version, "weight_version": version})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self._url + path, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as response:
            return json.load(response)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with GRPO, with a server that generates.")
    parser.add_argument("url")
    parser.add_argument("model_dir")
    parser.add_argument("checkpoints", help="the server's --weights_dir")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    for step, report in enumerate(Grpo(args.url, args.model_dir, args.checkpoints).train(args.steps), start=1):
        error = f"logprobs differ by {report.logprob_error:.1e} at most"
        print(f"step {step}: reward {report.reward:.3f}, weights {report.version}, {error}", flush=True)


if __name__ == "__main__":
    main()
