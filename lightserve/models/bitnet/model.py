"""BitNet b1.58: Llama with norms before the last linear of each half, and a squared ReLU as gate.

Neither weights nor inputs are rounded: a checkpoint that needs it has a quantization_config, which is refused.
"""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.llama.model import LlamaTpPartModel

LAYER_NAMES = bm.LayerNames(o_norm="self_attn.attn_sub_norm", down_norm="mlp.ffn_sub_norm")


class BitNetTpPartModel(LlamaTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), names=LAYER_NAMES)

    def _verify_params(self) -> None:
        self.config.check_value("mlp_bias", False)
