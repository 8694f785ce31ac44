"""docs/combinations.md has every pair as the table has it."""

from __future__ import annotations

from lightserve.config.combinations import FEATURES
from lightserve.config.parse import option_types
from test.config.combinations_page import PAGE, TITLES, page


def test_the_page_of_combinations_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python -m test.config.combinations_page"


def test_every_feature_has_a_title_or_is_a_flag() -> None:
    names = {feature.name for feature in FEATURES}

    assert TITLES.keys() <= names
    assert names - TITLES.keys() <= option_types().keys()
