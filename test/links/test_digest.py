"""What a gateway and its engines compare before they work together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightserve.config.parse import parse_server
from lightserve.links.digest import model_digest, weights_digest
from lightserve.model_files.source import resolve
from test.server.launcher_process import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(64) + b"weights")
    return tiny_model(tmp_path)


def digest(folder: Path) -> str:
    return model_digest(resolve(str(folder), needs_weights=False))


def test_a_gateway_without_weights_has_the_digest_of_its_engines(folder: Path) -> None:
    before = digest(folder)

    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"transformers_version": "9"})
    )

    assert digest(folder) == before


def test_another_config_or_tokenizer_has_another_digest(folder: Path) -> None:
    found = {digest(folder)}
    tiny_model(folder, vocab_size=65)
    found.add(digest(folder))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    found.add(digest(folder))

    assert len(found) == 3


def test_any_file_of_a_merged_adapter_changes_the_digest(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config has the scale of what is added to the weights."""
    source = resolve(str(folder), needs_weights=False)
    monkeypatch.setattr(type(source), "weight_files", lambda _: [])
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = parse_server([str(folder), f"--merge_lora={adapter}"])
    found = set()
    for alpha, weights in ((8, b"a"), (16, b"a"), (16, b"b")):
        (adapter / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
        (adapter / "adapter_model.safetensors").write_bytes(weights)
        found.add(weights_digest(source, config))

    assert len(found) == 3


def test_other_weights_or_options_have_another_digest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve(str(folder), needs_weights=False)
    weights = folder / "model.safetensors"
    monkeypatch.setattr(type(source), "weight_files", lambda _: [weights])  # a real one is checked for tensors

    def found(*flags: str) -> str:
        return weights_digest(source, parse_server([str(folder), *flags]))

    before = found()
    assert found("--tp=2", "--port=1") == before
    assert found("--data_type=float16") != before
    assert found("--load_format=dummy") != before
    weights.write_bytes(bytes(64) + b"WEIGHTS")
    assert found() != before
