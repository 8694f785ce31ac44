"""Youtu-LLM: the latent attention of DeepSeek V3, without experts."""

from __future__ import annotations

from lightserve.models.deepseek.model import DeepseekTpPartModel


class YoutuTpPartModel(DeepseekTpPartModel):
    def _is_sparse(self, layer_num: int) -> bool:
        return False
