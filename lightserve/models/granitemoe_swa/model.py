"""Granite with windows and sinks, and with experts, stored in two tensors a layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.granite_swa.model import with_windows
from lightserve.models.granitemoeshared.model import MOE_NAMES, GraniteMoeSharedTpPartModel

NAMES = replace(
    MOE_NAMES,
    router="block_sparse_moe.router",
    experts="block_sparse_moe.experts",
    expert=bm.ExpertNames(),
    shared_expert=bm.ExpertNames(down="output_linear"),
)


class GraniteMoeSwaTpPartModel(GraniteMoeSharedTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = with_windows(super().layer_spec(layer_num))
        assert spec.moe is not None
        return replace(spec, moe=replace(spec.moe, names=NAMES, layout=bm.ExpertsLayout.EACH))

    def adapt_checkpoint(self, checkpoint: Iterable[bm.CheckpointTensor]) -> Iterator[bm.CheckpointTensor]:
        config = self.config
        return bm.with_experts_apart(super().adapt_checkpoint(checkpoint), config.hidden_size, config.intermediate_size)
