"""Llama 4, whose layers attend to chunks, as a worker runs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightserve.common import ops
from lightserve.conformance.inputs.tensors import ints
from lightserve.errors import ModelFilesError
from lightserve.models.llama4.chunks import chunks_of
from test.models.architectures.case import MAX_LEN, Tiny, build
from test.models.architectures.cases import CASES
from test.models.test_latent_models import GREEDY, PROMPTS, generated, make
from test.models.tiny import build_model
from test.small_text import small_backend

CHUNK = 24  # of the case


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return build(CASES["llama4_text"])


@pytest.fixture(scope="module")
def folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama4")
    tiny.hf.save_pretrained(path)
    small_backend().save(str(path / "tokenizer.json"))
    return str(path)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "options",
    [{}, {"deterministic": True}, {"max_windowed_token_num": 300}],
    ids=["one pool", "deterministic", "a pool of chunks"],
)
def test_chunks_batches_and_cached_prefixes_give_the_tokens_of_transformers(
    folder: str, tiny: Tiny, device: str, options: dict[str, Any]
) -> None:
    expected = [generated(tiny.hf, ids) for ids in PROMPTS]
    whole, in_chunks = make(folder, device, **options), make(folder, device, batch_max_tokens=16, **options)

    alone = [whole.generate([ids], GREEDY)[0].token_ids for ids in PROMPTS]
    cached = [whole.generate([ids], GREEDY)[0].token_ids for ids in PROMPTS]
    chunked = [one.token_ids for one in in_chunks.generate(PROMPTS, GREEDY)]

    assert whole.worker.model.mem_manager.group_sizes == ((300,) if "max_windowed_token_num" in options else ())
    assert alone == expected
    assert cached == expected
    assert chunked == expected


def random_batch(rng: np.random.Generator) -> ops.AttnBatch:
    requests = int(rng.integers(1, 6))
    table = torch.from_numpy(rng.permutation(8 * 100).reshape(8, 100).astype(np.int32))
    ready = rng.integers(0, 60, requests)
    new = rng.integers(0, 40, requests) * rng.integers(0, 2, requests)
    rows = rng.permutation(8)[:requests]
    starts = np.cumsum(new) - new
    req_idx, start, seq_len, ready_len = (ints(column.tolist(), "cpu") for column in (rows, starts, ready + new, ready))
    return ops.AttnBatch(table, req_idx, start, seq_len, ready_len)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("size", [1, 7, 16, 200])
def test_every_new_token_sees_the_tokens_of_its_chunk(seed: int, size: int) -> None:
    batch = random_batch(np.random.default_rng(seed))
    tokens = int((batch.b_seq_len - batch.b_ready_cache_len).sum())

    chunks = chunks_of(batch, size, 2 * len(batch.b_req_idx) + tokens // size)

    assert seen_by_rows(chunks) == {
        row: slots[position // size * size :] for row, (position, slots) in rows_of(batch).items()
    }


def rows_of(batch: ops.AttnBatch) -> dict[int, tuple[int, list[int]]]:
    """By query row: its position, and the slots of the tokens up to it."""
    rows = {}
    columns = (batch.b_req_idx, batch.b_start_loc, batch.b_seq_len, batch.b_ready_cache_len)
    for req, start, seq_len, ready in zip(*(column.tolist() for column in columns), strict=True):
        for position in range(ready, seq_len):
            rows[start + position - ready] = position, batch.req_to_token[req, : position + 1].tolist()
    return rows


def seen_by_rows(batch: ops.AttnBatch) -> dict[int, list[int]]:
    return {row: slots for row, (_, slots) in rows_of(batch).items()}


def test_layers_with_chunks_keep_a_window_of_their_size(tiny: Tiny) -> None:
    layout = build_model(tiny.config_json, tiny.checkpoint(), max_len=MAX_LEN).kv_layout

    assert [(group.layers, group.window) for group in layout.groups] == [((0, 1, 2), CHUNK), ((3,), None)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok 2 is not supported for llama4_text; supported: 1"),
        ({"no_rope_layers": [1, 1]}, "no_rope_layers needs 4 numbers"),
        ({"moe_layers": 5}, "moe_layers is 5, wanted a list of numbers"),
        ({"attn_scale": "much"}, "attn_scale"),
    ],
)
def test_fields_that_do_not_fit_are_refused(tiny: Tiny, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        build_model({**tiny.config_json, **fields}, tiny.checkpoint(), max_len=MAX_LEN)
