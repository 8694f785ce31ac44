"""The indexer of sparse attention: with small queries and keys, it chooses the tokens that a layer attends to."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from lightserve.common import basemodel as bm, ops
from lightserve.errors import ModelFilesError

KEY_NORM_EPS = 1e-6
FULL, SHARED = "full", "shared"  # of indexer_types: the layer has an indexer, or has the tokens of the layer before
PATTERN = {"F": FULL, "S": SHARED}


class SelectionStep(NamedTuple):
    mem_index: Tensor  # [tokens] int32: cache slots the step fills
    attn: ops.AttnBatch
    top_k: int


class IndexerWeight(bm.WeightGroup):
    """Every rank computes all of it, so that all ranks choose the same tokens."""

    def __init__(self, spec: bm.LayerSpec, context: bm.WeightContext) -> None:
        config, at = spec.config, f"{spec.prefix}.self_attn.indexer"
        self.heads, self.dim = config.count("index_n_heads"), config.count("index_head_dim")
        context = replace(context, lora=None)
        query = bm.Block(f"{at}.wq_b", self.heads, self.dim, rotary_rows(config, self.heads))
        key = bm.Block(f"{at}.wk", 1, self.dim, rotary_rows(config, 1))
        self.wq_b = bm.ReplicatedWeight([query], config.count("q_lora_rank"), context)
        self.wk = bm.ReplicatedWeight([key], spec.hidden_size, context)
        self.k_norm = bm.LayerNormWeight(f"{at}.k_norm", self.dim, KEY_NORM_EPS, context)
        weights = bm.Block(f"{at}.weights_proj", self.heads)
        self.weights_proj = bm.ReplicatedWeight([weights], spec.hidden_size, context, is_router=True)

    def select(self, x: Tensor, q_a: Tensor, angles: ops.RotaryAngles, keys: Tensor, step: SelectionStep) -> Tensor:
        """Store the keys of a step, and return the slots of the tokens that its queries attend to.

        ``x``: what the attention reads; ``q_a``: its queries before they are expanded to heads. Factors that all heads
        share are left out: they change no order.
        """
        q = self.wq_b.mm(q_a).view(len(x), self.heads, self.dim)
        k = self.k_norm.norm(self.wk.mm(x))[:, None]
        ops.rotary(q, k, *angles)
        ops.write_kv(k, step.mem_index, keys)
        return ops.select_tokens(q, self.weights_proj.mm_float32(x), keys, step.attn, step.top_k)


def rotary_rows(config: bm.ModelConfig, heads: int) -> bm.RowMap | None:
    """The first rows of each head rotate. Some files have rotary pairs side by side."""
    if not config.flag("indexer_rope_interleave"):
        return None
    whole = bm.whole(heads, config.count("index_head_dim"))
    return bm.pairs_to_halves(whole, heads, config.count("qk_rope_head_dim"))


def has_indexer(config: bm.ModelConfig, layer_num: int) -> bool:
    """Whether a layer chooses tokens itself: as indexer_types or index_topk_pattern lists it, or every so many."""
    kinds = _listed(config.hf, config.num_layers)
    if kinds is not None:
        return kinds[layer_num] == FULL
    every, first = config.count("index_topk_freq", default=1), config.count("index_skip_topk_offset", default=2)
    return max(layer_num - first + 1, 0) % every == 0


def _listed(hf: Mapping[str, Any], num_layers: int) -> list[str] | None:
    name = next((name for name in ("indexer_types", "index_topk_pattern") if hf.get(name) is not None), None)
    if name is None:
        return None
    kinds: Any = hf[name]
    if isinstance(kinds, str):
        kinds = [PATTERN.get(letter) for letter in kinds]
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or any(kind not in (FULL, SHARED) for kind in kinds) or kinds[0] != FULL:
        raise ModelFilesError(
            f"config.json: {name} is {reprlib.repr(hf[name])}, wanted a list of {num_layers} times {FULL!r} or "
            f"{SHARED!r} that begins with {FULL!r}; correct it"
        )
    return list(kinds)
