from __future__ import annotations

import pytest

from lightserve.models.registry import MODELS
from test.models.page import FAMILIES, PAGE, page


def test_every_model_has_a_name_for_the_page() -> None:
    assert set(FAMILIES) == set(MODELS), "add its name to FAMILIES in test/models/page.py"


@pytest.mark.slow
def test_the_page_of_models_is_up_to_date_and_every_model_has_a_parity_case() -> None:
    text = page()

    assert PAGE.read_text() == text, "run `python -m test.models.page`"
    assert all(f"| `{model_type}` |" in text for model_type in MODELS)
