"""The score of a cross-encoder whose files ask for no sigmoid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.httpserver.pooling.test_routes import SCORE, posted

REGRESSION = replace(SCORE, is_regression=True)
SIGMOID = 1 / (1 + np.exp(-0.5))


@pytest.mark.parametrize(
    ("path", "body", "score"),
    [
        ("/score", {"text_1": "w5", "text_2": "w6"}, 0.5),
        ("/v1/rerank", {"query": "w5", "documents": ["w6"]}, 0.5),
        ("/rerank", {"query": "w5", "texts": ["w6"]}, SIGMOID),
        ("/predict", {"inputs": [["w5", "w6"]]}, SIGMOID),
    ],
)
def test_only_tei_squashes_the_number_of_a_regression(
    tmp_path: Path, path: str, body: dict[str, Any], score: float
) -> None:
    status, found = posted(tmp_path, REGRESSION, path, body)

    assert status == 200
    numbers = [value for key, value in _items(found) if "score" in key]
    assert numbers == pytest.approx([score])


def _items(value: Any) -> list[tuple[str, Any]]:
    """The fields of all objects inside ``value``."""
    if isinstance(value, list):
        return [item for each in value for item in _items(each)]
    if isinstance(value, dict):
        return [*value.items(), *(item for each in value.values() for item in _items(each))]
    return []
