"""The README is right: counts of models, figures, the comparison with other servers, links to all pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightserve.model_files.pooling.config import ENCODERS
from lightserve.models.registry import MODELS
from test.test_docs import PAGES, README, ROOT, by_name, definitions_of, section_of


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "models.md"], ids=by_name)
def test_a_page_counts_the_models(page: Path) -> None:
    decoders = len(MODELS.keys() - ENCODERS)

    assert f"{len(MODELS)} model types" in page.read_text()
    assert f"{decoders} generate text" in page.read_text()
    assert re.search(rf"\b{len(ENCODERS)} are (\[encoders\]|encoders)", page.read_text())


COMPARISON = ROOT / "docs" / "comparison.md"
# rows of the comparison, and a test of what LightServe's column says
FEATURES = {
    "schemas on one port": "test/api/test_other_clients.py::test_a_lightllm_benchmark_client_counts_every_token",
    "CPU": "test/api/test_openai_client.py::test_chat",
    "between processes": "test/test_layering.py::test_nothing_pickles",
    "queue full": "test/api/test_queue.py::test_a_full_queue_refuses_and_counts_it",
    "a model worker dies": "test/api/test_restart.py::"
    "test_sixteen_streams_end_with_the_same_text_when_their_worker_is_killed",
    "API key covers": "test/api/test_keys.py::test_every_other_route_needs_a_key",
    "until ready": "test/test_readme.py::test_the_comparison_has_the_start_of_the_banner",
    "prefix cache": "test/api/test_prefix_cache.py::test_each_turn_of_a_chat_computes_only_its_new_tokens",
    "CUDA graphs": "test/worker/test_step_runner.py::test_graphs_give_the_tokens_of_plain_launches",
    "structured output, tools": "test/api/test_structured_output.py::test_json_is_valid_for_its_schema",
    "token healing, constraints on the first token": "test/api/test_special_rules.py::"
    "test_the_output_starts_with_one_of_the_allowed_first_tokens",
    "quantised weights": "test/models/test_packed_formats.py::test_the_logits_are_those_of_the_dequantised_model",
    "LoRA": "test/api/test_lora.py::test_adapters_change_the_text",
    "beyond one machine": "test/api/test_engines.py::test_two_engines_over_tcp_give_the_same_text_as_one_server",
    "images": "test/api/test_images.py::test_text_after_images_is_that_of_transformers",
}


def comparison_rows() -> dict[str, str]:
    """What the comparison says of LightServe."""
    return dict(re.findall(r"^\| (\w.*?) \| (.+?) \|", COMPARISON.read_text(), flags=re.MULTILINE))


def test_every_feature_in_the_comparison_has_a_test() -> None:
    rows = comparison_rows()

    assert rows.keys() == FEATURES.keys()
    assert [feature for feature, answer in rows.items() if answer == "no"] == []
    for test in FEATURES.values():
        file, _, function = test.partition("::")
        assert function in definitions_of(ROOT / file), test


def test_the_comparison_has_the_start_of_the_banner() -> None:
    (total,) = re.findall(r"^  start .* total ([\d.]+) s$", COMPARISON.read_text(), flags=re.MULTILINE)

    assert comparison_rows()["until ready"].startswith(f"{float(total):.0f} s ")


def test_figures_in_the_readme_are_those_of_the_page_on_speed() -> None:
    rows = re.findall(r"^\| .*\*\* \|$", section_of(README, "Speed"), flags=re.MULTILINE)

    assert len(rows) == 4
    assert set(rows) <= set((ROOT / "docs" / "speed.md").read_text().splitlines())


def test_the_readme_can_be_read_in_one_sitting() -> None:
    assert len(README.read_text().splitlines()) <= 130


def pages_linked_on(page: Path) -> set[Path]:
    links = re.findall(r"\]\(([\w/.-]+\.md)[#)]", page.read_text())
    return {(page.parent / link).resolve() for link in links}


def test_the_readme_links_every_page() -> None:
    assert {page for page in PAGES if page.parent == ROOT / "docs"} <= pages_linked_on(README)


FOLDERS = sorted(folder for folder in (ROOT / "docs").iterdir() if any(folder.glob("*.md")))


@pytest.mark.parametrize("folder", FOLDERS, ids=by_name)
def test_the_page_of_a_folder_links_every_page_in_it(folder: Path) -> None:
    assert set(folder.glob("*.md")) <= pages_linked_on(folder.with_suffix(".md"))
