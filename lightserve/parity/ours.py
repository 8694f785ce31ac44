"""This engine, for a comparison: greedy text by its scheduler, logits by its model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightserve.common.basemodel import LogitRows, ModelInput, TpPartBaseModel
from lightserve.common.ops import AttnBatch
from lightserve.errors import LightserveError
from lightserve.offline.llm import LLM

CHUNK = 128  # tokens of a prompt in one step


def greedy_ids(llm: LLM, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    """All prompts together, as a server runs them."""
    generations = llm.generate(prompts, max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
    for generation in generations:
        if generation.error is not None:
            raise LightserveError(f"a prompt of {len(generation.prompt_ids)} tokens fails: {generation.error}")
    return [generation.token_ids for generation in generations]


def logits_of(model: TpPartBaseModel, ids: Sequence[int], num_decoded: int) -> Tensor:
    """Of every token but the last, ``[tokens - 1, vocab]``. The last ``num_decoded`` ones come from decode steps.

    It writes into the first slots of the KV pool, so the engine must not run afterwards.
    """
    return torch.cat([model.forward(step).float().cpu() for step in _steps(model, ids[:-1], num_decoded - 1)])


def _steps(model: TpPartBaseModel, ids: Sequence[int], num_decoded: int) -> Iterator[ModelInput]:
    """The prompt in chunks, then one token each."""
    prompt = len(ids) - max(num_decoded, 0)
    ends = [*range(CHUNK, prompt, CHUNK), *range(prompt, len(ids) + 1)]
    for begin, end in zip([0, *ends], ends, strict=False):
        yield _step(model, ids, begin, end)


def _step(model: TpPartBaseModel, ids: Sequence[int], begin: int, end: int) -> ModelInput:
    """Tokens of a request in the first row, with position i in slot i."""
    slots = torch.arange(begin, end, dtype=torch.int32, device=model.device)
    model.req_manager.req_to_token[0, begin:end] = slots
    zero = torch.zeros(1, dtype=torch.int32, device=model.device)
    attn = AttnBatch(model.req_manager.req_to_token, zero, zero, zero + end, zero + begin)
    tokens = torch.tensor(list(ids[begin:end]), device=model.device)
    return ModelInput(tokens, slots, slots, attn, is_prefill=end - begin > 1, logit_rows=LogitRows.ALL)


def perplexity(llm: LLM, windows: Sequence[list[int]]) -> float:
    """Of all tokens but the first of each window, by the logprobs of prompts."""
    logprobs: list[float] = []
    for ids in windows:
        (generation,) = llm.generate([ids], max_new_tokens=1, temperature=0, prompt_logprobs=0)
        if generation.prompt_logprobs is None:
            raise LightserveError(f"a window of {len(ids)} tokens has no logprobs: {generation.error}")
        logprobs += [token.logprob for token in generation.prompt_logprobs if token.logprob is not None]
    return math.exp(-math.fsum(logprobs) / len(logprobs))
