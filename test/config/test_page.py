"""docs/flags.md has every flag as the configuration has it."""

from __future__ import annotations

from test.config.page import PAGE, page


def test_the_page_of_flags_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python -m test.config.page"
