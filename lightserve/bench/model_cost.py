"""The minimum cost of a step: the bytes that a device must read and the multiplications that it must compute."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.bench.ceilings import Ceilings
from lightserve.common.basemodel import TpPartBaseModel


@dataclass(frozen=True, slots=True)
class Work:
    """One step of ``batch`` requests, each with ``new`` tokens behind ``cached`` ones."""

    batch: int
    new: int
    cached: int

    @property
    def tokens(self) -> int:
        return self.batch * self.new

    @property
    def kv_tokens(self) -> int:
        """Of which the keys and values are read."""
        return self.batch * (self.cached + self.new)

    @property
    def pairs(self) -> float:
        """Of a query and a key that it sees."""
        return self.tokens * (self.cached + (self.new + 1) / 2)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A model on one rank."""

    weight_bytes: int  # that every step reads: all but the embedding
    layer_params: int  # that every token is multiplied with
    head_params: int  # that every request's last token is multiplied with
    kv_token_bytes: int
    pair_flops: int  # of a query with a key and its value, all heads and layers

    @classmethod
    def of(cls, model: TpPartBaseModel) -> ModelCost:
        layers = [layer.stored_size() for layer in model.layer_weights]
        head = model.pre_post_weight.lm_head.stored_size()
        return cls(
            weight_bytes=sum(size.num_bytes for size in [*layers, head]),
            layer_params=sum(size.num_weights for size in layers),
            head_params=head.num_weights,
            kv_token_bytes=model.kv_layout.bytes_per_token,
            pair_flops=sum(4 * spec.num_heads // model.tp.size * spec.head_dim for spec in model.layer_specs),
        )

    def floor_s(self, work: Work, ceilings: Ceilings) -> float:
        """Matmuls and attention one after the other, each as fast as the device can."""
        matmul_flops = 2 * (self.layer_params * work.tokens + self.head_params * work.batch)
        matmuls = ceilings.floor_s(self.weight_bytes, matmul_flops)
        return matmuls + ceilings.floor_s(self.kv_token_bytes * work.kv_tokens, self.pair_flops * work.pairs)
