"""RoBERTa and XLM-RoBERTa: BERT whose positions begin behind that of the padding token."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.bert.model import BertTpPartModel


class RobertaTpPartModel(BertTpPartModel):
    def model_spec(self) -> bm.ModelSpec:
        spec = super().model_spec()
        names = replace(spec.names, optional_prefix="roberta.")
        return replace(spec, names=names, position_offset=self.config.count_or_0("pad_token_id") + 1)
