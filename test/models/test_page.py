from __future__ import annotations

from pathlib import Path

import pytest

from lightserve.models.registry import MODELS
from test.models.page import page

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.slow
def test_the_page_of_models_is_up_to_date_and_every_model_has_a_parity_case() -> None:
    text = page()

    assert PAGE.read_text() == text, "run `python -m test.models.page > docs/models.md`"
    assert all(f"| `{model_type}` |" in text for model_type in MODELS)
