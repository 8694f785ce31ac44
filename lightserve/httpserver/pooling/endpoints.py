"""Which endpoints answer for a model that computes no text."""

from __future__ import annotations

from lightserve.model_files.pooling import PoolingConfig

PAIRS = ("/score", "/rerank")
LABELS = ("/classify", "/predict")


def endpoints_of(config: PoolingConfig) -> tuple[str, ...]:
    """Those of its task come first."""
    pairs = PAIRS if config.is_pair_scorer else ()
    reward = ("/get_score",) if config.size == 1 else ()
    match config.task:
        case "embed":
            endpoints = ("/v1/embeddings", "/embed", *PAIRS)
        case "classify":
            endpoints = (*LABELS, *pairs, *reward)
        case "score":
            endpoints = (*pairs, *LABELS, *reward)
        case _:
            endpoints = (*reward, *pairs)
    return (*endpoints, "/pooling")
