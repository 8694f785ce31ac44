"""Compares a model with itself before it serves: with transformers' own attention, in one piece, and as it is served.

A model may have state beside its KV, look at positions of its own, or mix the requests of a step. That shows here, and
not in the texts of clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightserve.common.basemodel import LogitRows, ModelInput
from lightserve.common.ops import AttnBatch
from lightserve.errors import NotComputableError
from lightserve.models.transformers_backend.attention import BACKEND

if TYPE_CHECKING:
    from lightserve.models.transformers_backend.model import TransformersTpPartModel

LENGTHS = (19, 6)  # tokens of two requests
CHUNKS = ((11, 2), (7, 0), (0, 3), (1, 1))  # tokens of each in every step: prompts in chunks, beside others, decodes
# of the largest logit; transformers' attention rounds at other places
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
MOST_ROWS = {torch.float32: 1.0, torch.float16: 0.75, torch.bfloat16: 0.75}  # rounding may choose other experts


def check_logits(model: TransformersTpPartModel) -> None:
    lengths = [min(length, model.req_manager.max_len) for length in LENGTHS]
    ids = [
        (torch.arange(n, device=model.device) * 37 + 11 * i + 3) % model.config.vocab_size
        for i, n in enumerate(lengths)
    ]
    expected = torch.cat([_reference(model, request) for request in ids])
    computed = torch.cat(_served(model, ids))
    errors = (computed.float() - expected.float()).abs().amax(-1)
    is_close = errors <= TOLERANCE[model.args.dtype] * expected.float().abs().max()
    if not is_close.float().mean() >= MOST_ROWS[model.args.dtype]:
        raise NotComputableError(
            f"with the KV cache of this server its logits differ from transformers' by {errors.max():.2g}, of "
            f"{expected.float().abs().max():.2g}: it has state beside its KV, or attention of its own"
        )


@torch.inference_mode()
def _reference(model: TransformersTpPartModel, ids: Tensor) -> Tensor:
    model.hf.set_attn_implementation("eager")
    try:
        logits: Tensor = model.hf(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        model.hf.set_attn_implementation(BACKEND)
    return logits


def _served(model: TransformersTpPartModel, ids: list[Tensor]) -> list[Tensor]:
    """The logits of every token of each request, in several steps."""
    ready = [0] * len(ids)
    pieces: list[list[Tensor]] = [[] for _ in ids]
    for counts in CHUNKS:
        ends = [min(done + count, len(request)) for done, count, request in zip(ready, counts, ids, strict=True)]
        rows = [row for row in range(len(ids)) if ends[row] > ready[row]]
        if not rows:
            continue
        logits = model.forward(_step(model, ids, rows, ready, ends))
        for row, row_logits in zip(
            rows, logits.split_with_sizes([ends[row] - ready[row] for row in rows]), strict=True
        ):
            pieces[row].append(row_logits)
        ready = ends
    return [torch.cat(parts) for parts in pieces]


def _step(
    model: TransformersTpPartModel, ids: list[Tensor], rows: list[int], ready: list[int], ends: list[int]
) -> ModelInput:
    """The tokens of some requests from ``ready`` to ``ends``. Slots go down, so that none is where its token is."""
    table = model.req_manager.req_to_token
    last = model.mem_manager.size - 1
    spans = [torch.arange(ready[row], ends[row], device=model.device) for row in rows]
    slots = [(last - len(ids) * span - row).int() for row, span in zip(rows, spans, strict=True)]
    for row, span, row_slots in zip(rows, spans, slots, strict=True):
        table[row, span] = row_slots
    counts = [ends[row] - ready[row] for row in rows]

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=model.device)

    attn = AttnBatch(
        table,
        ints(rows),
        ints([sum(counts[:i]) for i in range(len(rows))]),
        ints([ends[row] for row in rows]),
        ints([ready[row] for row in rows]),
    )
    return ModelInput(
        torch.cat([ids[row][span] for row, span in zip(rows, spans, strict=True)]),
        torch.cat(spans).int(),
        torch.cat(slots),
        attn,
        is_prefill=max(counts) > 1,
        logit_rows=LogitRows.ALL,
    )
