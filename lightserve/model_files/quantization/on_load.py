"""``--quantization``: float weights that are quantised while they are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.model_files.quantization.quant_config import QuantConfig, Scheme

NOT_QUANTIZED = ("lm_head", "embed_tokens", "wte", "word_embeddings", "output", "tok_embeddings", "router", "gate")


@dataclass(frozen=True)
class OnLoadScheme(Scheme):
    kind: str  # fp8, int8 or w4


@dataclass(frozen=True)
class OnLoadConfig(QuantConfig):
    scheme: OnLoadScheme

    def scheme_of(self, module: str) -> Scheme | None:
        """Embeddings, heads and routers stay as they are: they are sensitive, or hardly any memory."""
        return None if module.rpartition(".")[2] in NOT_QUANTIZED else self.scheme

    def __str__(self) -> str:
        return f"{self.scheme.kind}, quantised while loading"
