"""Pages that show code show the code that runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightserve.models.registry import MODELS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_page_on_adding_a_model_is_the_model() -> None:
    page = (ROOT / "docs" / "adding_a_model.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)

    assert "".join(blocks) == (ROOT / "lightserve/models/qwen3/model.py").read_text()
    assert f'"qwen3": "{MODELS["qwen3"]}"' in page
    tiny = (ROOT / "test/models/tiny.py").read_text()
    assert all(line in tiny for line in re.findall(r'^ +"qwen3": lambda.*$', page, flags=re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_on_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    paths = re.findall(r"`((?:lightserve|test|docs)/[\w/.-]+)`", text)

    for link in links:
        assert (page.parent / link).exists(), link
    for path in paths:
        assert (ROOT / path).exists(), path
