"""Chats with images, and the texts that transformers gives them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from test.api.server import ServerProcess
from test.vision_model import END, PAD, START, VOCAB_SIZE, greedy, oracle_inputs, png

NEW_TOKENS = 6


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def part_of(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def user(*parts: str | Image.Image) -> dict[str, Any]:
    content = [{"type": "text", "text": each} if isinstance(each, str) else part_of(each) for each in parts]
    return {"role": "user", "content": content}


def ask(server: ServerProcess, messages: Sequence[dict[str, Any]], **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, **fields}
    status, response = server.post("/v1/chat/completions", body)
    assert status == 200, response
    return response["choices"][0]["message"]["content"], response["usage"]


def expected(model: Any, prompt: Sequence[int | Image.Image], count: int = NEW_TOKENS) -> str:
    """``prompt``: an image stands where it is."""
    ids = [token_id for each in prompt for token_id in ([each] if isinstance(each, int) else [START, PAD, END])]
    images = [each for each in prompt if not isinstance(each, int)]
    text = greedy(model, ids, images, count)
    return " ".join(f"w{token_id}" for token_id in text if token_id < VOCAB_SIZE)  # others have no text


def best_beams(model: Any, prompt: Sequence[int], image: Image.Image, num_beams: int, num_tokens: int) -> list[str]:
    """By the logits of transformers, the best first. ``prompt`` has PAD once."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(num_tokens):
        candidates = []
        for score, ids in beams:
            with torch.inference_mode():
                out = model(**oracle_inputs([*prompt, *ids], [image], model.config.model_type))
            logprobs, best = out.logits[0, -1].log_softmax(-1).topk(num_beams + 1)
            candidates += [
                (score + logprob, [*ids, token_id])
                for logprob, token_id in zip(logprobs.tolist(), best.tolist(), strict=True)
            ]
        beams = sorted(candidates, reverse=True)[:num_beams]
    return [" ".join(f"w{token_id}" for token_id in ids if token_id < VOCAB_SIZE) for _, ids in beams]
