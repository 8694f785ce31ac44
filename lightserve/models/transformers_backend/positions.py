"""Finds layers that count positions by themselves.

Our steps hold tokens of several requests, and the cache of transformers is not used. A layer that adds the length of
that cache to the number of a token, instead of taking its position, would be wrong; in Llama 4 only thousands of tokens
later, so that short prompts do not show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightserve.errors import ModelFilesError

NUM_TOKENS = 4


def check_positions(decoder: Any, vocab_size: int, device: torch.device) -> None:
    """Run ``decoder`` with a cache of transformers, and raise ModelFilesError if a layer asks for its length."""
    from transformers import DynamicCache

    running: list[int] = []  # layers that are being computed

    class WatchedCache(DynamicCache):  # type: ignore[misc]  # transformers declares no types
        def get_seq_length(self, layer_idx: int = 0) -> int:
            if running:
                raise ModelFilesError(f"layer {running[-1]} computes positions from the length of transformers' cache")
            length: int = super().get_seq_length(layer_idx)
            return length

    ids = torch.arange(NUM_TOKENS, device=device)[None] % vocab_size
    with torch.inference_mode(), _noting_layers(decoder, running):
        decoder(
            input_ids=ids,
            position_ids=torch.arange(NUM_TOKENS, device=device)[None],
            past_key_values=WatchedCache(config=decoder.config),
            use_cache=True,
        )


def _leave(running: list[int]) -> None:
    running.pop()


@contextmanager
def _noting_layers(decoder: Any, running: list[int]) -> Iterator[None]:
    hooks = []
    for module in decoder.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            hooks.append(module.register_forward_pre_hook(lambda module, _: running.append(module.layer_idx)))
            hooks.append(module.register_forward_hook(lambda *_: _leave(running)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
