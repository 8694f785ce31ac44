"""ERNIE 4.5 MoE: ERNIE 4.5 with experts by softmax and a bias, and shared experts, in most layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import RouteSpec
from lightserve.models.ernie4_5.model import Ernie45TpPartModel

NAMES = bm.MoeNames(score_bias="mlp.moe_statics.e_score_correction_bias")


class Ernie45MoeTpPartModel(Ernie45TpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = super().layer_spec(layer_num)
        return replace(spec, moe=self._moe()) if self._is_sparse(layer_num) else spec

    def _moe(self) -> bm.MoeSpec:
        width = self.config.count("moe_intermediate_size")
        return bm.MoeSpec(
            num_experts=bm.num_experts_of(self.config),
            intermediate_size=width,
            route=RouteSpec(bm.top_k_of(self.config), renormalize=True),
            names=NAMES,
            is_router_float32=True,
            has_score_bias=True,
            shared_size=width * self.config.count_or_0("moe_num_shared_experts"),
        )

    def _is_sparse(self, layer_num: int) -> bool:
        config = self.config
        last = config.hf.get("moe_layer_end_index")
        end = config.num_layers if last in (None, -1) else config.count_or_0("moe_layer_end_index") + 1
        is_in_turn = (layer_num + 1) % config.count("moe_layer_interval", default=1) == 0
        return is_in_turn and config.count_or_0("moe_layer_start_index") <= layer_num < end

    def adapt_checkpoint(self, checkpoint: Iterable[bm.CheckpointTensor]) -> Iterator[bm.CheckpointTensor]:
        """The bias of the scores has a dimension of size 1 before that of the experts."""
        for tensor in super().adapt_checkpoint(checkpoint):
            is_bias = tensor.name.endswith(NAMES.score_bias)
            yield tensor._replace(tensor=tensor.tensor.flatten()) if is_bias else tensor

    def _verify_params(self) -> None:
        self.config.check_value("use_bias", False)  # of the experts and of the head too
