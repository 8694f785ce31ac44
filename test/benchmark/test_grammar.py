from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmark import models
from benchmark.engine import grammar
from lightserve.common.basemodel import ModelConfig
from lightserve.messages.params import GrammarSpec
from lightserve.model_files.source import resolve


def test_the_large_model_has_the_shape_of_an_8b(tmp_path: Path, small_folder: str) -> None:
    models.save_model(tmp_path, small_folder, models.LARGE)

    config = ModelConfig.from_hf(resolve(str(tmp_path), needs_weights=False).hf_config())

    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 32, 8, 128)
    assert config.vocab_size == resolve(small_folder).hf_config()["vocab_size"]


def test_every_model_is_measured_with_every_share(small_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "LARGE", models.TINY | {"num_hidden_layers": 2})
    monkeypatch.setattr(grammar, "REPEATS", 1)
    monkeypatch.setattr(grammar, "schema_grammar", lambda _: GrammarSpec("regex", "[ab]*"))
    args = argparse.Namespace(
        model_dir=small_folder, device="cpu", batch=4, tokens=8, layers=1, temperature=0.0, large=True
    )

    rates = grammar.measure_models(args)

    assert set(rates) == {"tiny", "null", "large"}
    for by_kind in rates.values():
        assert set(by_kind) == set(grammar.KINDS)
        assert all(rate.tokens_per_s > 0 and rate.steps > 2 for rate in by_kind.values())


def test_the_null_model_runs_no_layer(small_folder: str) -> None:
    args = argparse.Namespace(model_dir=small_folder, device="cpu", batch=2, tokens=8, layers=1, temperature=0.0)

    with grammar.open_model(args, models.TINY) as llm:
        grammar.remove_forward_pass(llm)
        llm.worker.model.layers_infer = None  # type: ignore[assignment]
        outs = llm.generate([[5], [6]], max_new_tokens=3, temperature=0, ignore_eos=True)

    assert [len(set(out.token_ids)) for out in outs] == [1, 1], "the logits are the same at every step"
