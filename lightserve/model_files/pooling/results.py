"""From the numbers that a worker returns to embeddings, probabilities and scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lightserve.errors import InvalidRequestError
from lightserve.model_files.pooling.config import PoolingConfig

Vector = npt.NDArray[np.float32]


def vector_of(values: bytes) -> Vector:
    return np.frombuffer(values, dtype=np.float32)


def embedding(vector: Vector, dimensions: int | None = None, normalize: bool = True) -> Vector:
    """The first ``dimensions`` numbers, of length 1 if ``normalize``."""
    if dimensions is not None:
        if dimensions > len(vector):
            raise InvalidRequestError(f"dimensions is {dimensions}; the model has {len(vector)}", "dimensions")
        vector = vector[:dimensions]
    if not normalize:
        return vector
    return vector / np.float32(max(float(np.sqrt(np.dot(vector, vector))), 1e-12))


def token_vectors(values: Vector, size: int) -> Vector:
    """``[tokens, size]``, each of length 1."""
    vectors: Vector = values.reshape(-1, size)
    lengths: Vector = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    units: Vector = vectors / np.maximum(lengths, np.float32(1e-12))
    return units


def max_sim(query: Vector, document: Vector) -> float:
    """The sum, over the vectors of the query, of the largest product with one of the document."""
    return float((query @ document.T).max(axis=1).sum()) if len(document) else 0.0


def cosine(first: Vector, second: Vector) -> float:
    return float(np.dot(embedding(first), embedding(second)))


def probabilities(config: PoolingConfig, logits: Vector) -> Vector:
    """Of the labels: sigmoid if there is one or if they do not exclude each other, else softmax.

    The number of a regression stays as it is.
    """
    if config.is_regression:
        return logits
    if len(logits) == 1 or config.is_multi_label:
        result: Any = 1 / (1 + np.exp(-logits.astype(np.float64)))
    else:
        shifted = np.exp(logits.astype(np.float64) - logits.max())
        result = shifted / shifted.sum()
    return np.asarray(result, dtype=np.float32)


def pair_score(config: PoolingConfig, logits: Vector, is_raw: bool = False) -> float:
    """How well a document answers a query: between 0 and 1, if the model is no regression.

    ``is_raw``: the number before that.
    """
    if config.answers is not None:
        logit = float(logits[-1]) - (float(logits[0]) if len(config.answers) > 1 else 0.0)
        logit *= 1.0 if config.template is None else config.template.scale
        return logit if is_raw else float(1 / (1 + np.exp(-logit)))  # the softmax of two is a sigmoid
    return float(logits[0]) if is_raw else float(probabilities(config, logits)[0])
