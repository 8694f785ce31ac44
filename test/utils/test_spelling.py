from __future__ import annotations

import pytest

from lightserve.utils.spelling import nearest


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("--prot", ["--port", "--tp"], "--port"),
        ("--port", ["--tp", "--top"], None),  # the dashes alone are no likeness
        ("--max-model-lne", ["--max_model_len", "--max-model-len"], "--max-model-len"),
        ("--max_model_lne", ["--max_model_len", "--max-model-len"], "--max_model_len"),
        ("--prot=80", ["--port"], "--port"),
        ("srve", ["serve", "chat"], "serve"),
        ("xyzzy", ["serve", "chat"], None),
    ],
)
def test_a_typo_has_a_nearest_name(name: str, known: list[str], found: str | None) -> None:
    assert nearest(name, known) == found
