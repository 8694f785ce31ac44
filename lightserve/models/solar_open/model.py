"""Solar Open is GLM-4.5 without norms of queries and keys, and with experts in all layers."""

from __future__ import annotations

from lightserve.models.glm4_moe.model import Glm4MoeTpPartModel


class SolarOpenTpPartModel(Glm4MoeTpPartModel):
    def _verify_params(self) -> None:
        self.config.check_value("use_qk_norm", False)
        self.config.check_value("first_k_dense_replace", 0)
