"""What the KV of a worker depends on. It is compared before KV is sent to another engine, and found by no other key."""

from __future__ import annotations

from dataclasses import replace as replace_field
from hashlib import blake2b

from msgspec.structs import replace

from lightserve import __version__
from lightserve.common.basemodel import TpPartBaseModel
from lightserve.config import WorkerConfig
from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.control import KvIdentity
from lightserve.model_files.config.digest import config_digest
from lightserve.worker.kv.offload.block_store.frame import identity_of
from lightserve.worker.kv.transfer.rank_heads import KvRank, RankHeads, total_heads


def make_kv_identity(config: WorkerConfig, model: TpPartBaseModel, computed: str) -> KvIdentity:
    """The same on all ranks."""
    max_len = model.req_manager.max_len
    factors = [None if spec.rope is None else spec.rope.factors(max_len) for spec in model.layer_specs]
    return KvIdentity(
        config.attention_tp,
        config.pp,
        __version__,
        _digest(config_digest(model.config.hf), factors, config.packed_input_bits),
        computed,
        _digest(model.model_kv_layout, BLOCK_TOKENS, *_draft_head(config), *_routed_experts(model)),
        config.deterministic,
    )


def exchanged_identity(identity: KvIdentity, model: TpPartBaseModel, num_groups: int) -> KvIdentity:
    """For engines that send each other KV: blocks of KV groups with pools of their own are sent apart.

    Heads may be divided among other ranks. Then sums are in another order, which --deterministic forbids.
    """
    heads = None if identity.is_deterministic else total_heads(model)
    if heads is not None:
        groups = (replace_field(group, num_heads=n) for group, n in zip(model.kv_layout.groups, heads, strict=True))
        layout = replace_field(model.kv_layout, groups=tuple(groups))
        digest = _digest(layout, BLOCK_TOKENS, *_routed_experts(model))
        identity = replace(identity, layout=digest, is_divisible=True)
    return replace(identity, layout=f"{identity.layout} in {1 + num_groups} pools") if num_groups else identity


def rank_of(exchanged: KvIdentity, model: TpPartBaseModel, rank: int) -> KvRank:
    """A rank of an engine with this identity."""
    if exchanged.is_divisible:
        heads = RankHeads(rank, exchanged.tp, total_heads(model))
        return KvRank(heads, identity_of(replace(exchanged, tp=0)))
    return KvRank(RankHeads(rank, exchanged.tp * exchanged.pp), identity_of(exchanged, rank))


def _draft_head(config: WorkerConfig) -> tuple[str, ...]:
    """Whose KV is stored with that of the model."""
    speculation = config.speculation
    return () if speculation is None or not speculation.has_head else (speculation.method, str(speculation.model))


def _routed_experts(model: TpPartBaseModel) -> tuple[object, ...]:
    """Whose choices are stored with the KV of tokens."""
    shape = model.routed_experts_shape
    return () if shape is None else (shape,)


def rank_identity(identity: KvIdentity, rank: int, num_pools: int = 1) -> bytes:
    """Of the part of the KV that one rank has. With several pools, a block has the layers of one of them."""
    return identity_of(identity, rank) if num_pools == 1 else identity_of(identity, rank, num_pools)


def _digest(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()
