"""The input of a step as one array of integers: one copy takes it to the device."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightserve.worker.shared_prefixes import MAX_GROUPS

TOKEN_COLUMNS = 4  # of int32: see StepColumns
REQUEST_COLUMNS = 7  # four of int32, one of float32, one of int64
GROUP_FIELDS = 4  # of int32: see ops.AttnBatch.shared_prefixes
ALIGNED = 4  # every column begins at a multiple of 16 bytes: Triton compiles a kernel again for one that does not


class StepShape(NamedTuple):
    """What a step launches depends on this alone."""

    tokens: int
    requests: int
    has_decodes: bool  # requests with one token
    has_prompts: bool  # requests with several
    has_shared: bool = False  # requests with one, in groups that share a prefix


class StepColumns(NamedTuple):
    """The input of a step, on the host or the device: ``[tokens]`` and ``[requests]`` each."""

    tokens: tuple[Any, Any, Any, Any]  # row of req_to_token, position, slot, id
    requests: tuple[Any, Any, Any, Any]  # row, first token, length, length that is cached before the step
    temperature: Any  # float32
    seed: Any  # int64
    groups: Any = None  # [MAX_GROUPS, GROUP_FIELDS] of shared prefixes, where there may be some


def columns_of(inputs: Any, shape: StepShape, float32: Any, int64: Any) -> StepColumns:
    """Views of ``inputs``, a tensor or an array; the types are torch's or numpy's."""
    tokens, requests = shape.tokens, shape.requests
    width, req_width = _aligned(tokens), _aligned(requests)
    first = TOKEN_COLUMNS * width
    row, position, slot, token_id = (inputs[i * width : i * width + tokens] for i in range(TOKEN_COLUMNS))
    req_row, start, seq_len, ready, temperature, seed = (first + i * req_width for i in range(REQUEST_COLUMNS - 1))
    return StepColumns(
        (row, position, slot, token_id),
        (
            inputs[req_row : req_row + requests],
            inputs[start : start + requests],
            inputs[seq_len : seq_len + requests],
            inputs[ready : ready + requests],
        ),
        inputs[temperature : temperature + requests].view(float32),
        inputs[seed : seed + 2 * requests].view(int64),
        inputs[first + REQUEST_COLUMNS * req_width :].reshape(MAX_GROUPS, GROUP_FIELDS) if shape.has_shared else None,
    )


def input_size(shape: StepShape) -> int:
    """Integers in the input of a step."""
    groups = MAX_GROUPS * GROUP_FIELDS if shape.has_shared else 0
    return TOKEN_COLUMNS * _aligned(shape.tokens) + REQUEST_COLUMNS * _aligned(shape.requests) + groups


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED
