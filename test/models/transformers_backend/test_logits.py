"""Models that transformers' modules compute give its logits, for any split of the tokens into steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightserve.common import (
    cpu_kernel,  # noqa: F401  registers its backend
    ops,
    triton_kernel,  # noqa: F401  registers its backend
)
from lightserve.common.basemodel import LogitRows
from lightserve.offline.llm import LLM
from test.models.architectures.case import hf_logits
from test.models.session import Session
from test.models.test_architectures import LONG, assert_same
from test.models.transformers_backend.tiny_models import CASES, load, save

ON_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    ops.use_backend("triton" if ON_GPU else "cpu")
    yield
    ops.use_backend(ops.REFERENCE)


@pytest.mark.parametrize("name", CASES)
def test_chunks_cached_prefixes_and_decode_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    hf = save(CASES[name], tmp_path)
    session = Session(load(tmp_path))
    whole, chunk, prefix, other = LONG

    first = session.step({0: whole[:chunk]}, logit_rows=LogitRows.ALL)
    second = session.step({1: other, 0: whole[chunk:]}, logit_rows=LogitRows.ALL)
    session.share_prefix(0, 2, length=prefix)
    shared = session.step({2: other}, logit_rows=LogitRows.ALL)
    decoded = session.step({0: [5], 1: [6], 2: [7]})

    expected = [hf_logits(hf, [*whole, 5]), hf_logits(hf, [*other, 6]), hf_logits(hf, [*whole[:prefix], *other, 7])]
    assert_same(
        [torch.cat([first, second[len(other) :]]), second[: len(other)], shared, decoded],
        [expected[0][:-1], expected[1][:-1], expected[2][prefix:-1], torch.stack([one[-1] for one in expected])],
    )


def test_logits_can_be_computed_a_few_rows_at_a_time(tmp_path: Path) -> None:
    hf = save(CASES["vaultgemma"], tmp_path)
    model = load(tmp_path)
    session = Session(model)
    hidden = model.hidden_states(session.input_of({0: LONG.first[:30], 1: LONG.other}))

    pieces = [model.logits(hidden, torch.arange(i, i + 10, device=model.device)) for i in range(0, 70, 10)]
    last = model.logits(hidden)

    theirs = torch.cat([hf_logits(hf, LONG.first[:30]), hf_logits(hf, LONG.other)])
    assert_same([torch.cat(pieces).cpu(), last.cpu()], [theirs, theirs[[29, 69]]])


def test_windows_softcaps_sinks_and_scales_are_those_of_the_model(tmp_path: Path) -> None:
    save(CASES["vaultgemma"], tmp_path / "vaultgemma")
    save(CASES["mimo_v2_flash"], tmp_path / "mimo")

    gemma, mimo = load(tmp_path / "vaultgemma"), load(tmp_path / "mimo")

    windows = [gemma.layers[i].options.window for i in range(3)]
    assert windows == [21, None, 21]
    assert {layer.options.softcap for layer in gemma.layers.values()} == {2.0}
    assert {layer.options.scale for layer in gemma.layers.values()} == {24**-0.5}
    assert any(layer.options.sinks is not None for layer in mimo.layers.values())


def test_a_window_longer_than_every_request_is_none(tmp_path: Path) -> None:
    save(CASES["vaultgemma"], tmp_path)

    model = load(tmp_path, max_len=21)

    assert {layer.options.window for layer in model.layers.values()} == {None}


CONFIG_CODE = """
from transformers import HeliumConfig

class OwnConfig(HeliumConfig):
    model_type = "of_this_folder"
"""
MODEL_CODE = """
import torch
from transformers import HeliumForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(HeliumForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = torch.tanh(out.logits)
        return out
"""


def test_code_of_the_folder_computes_if_it_is_trusted(tmp_path: Path) -> None:
    hf = save(CASES["helium"], tmp_path)
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "of_this_folder", "auto_map": classes}))
    (tmp_path / "configuration_own.py").write_text(CONFIG_CODE)
    (tmp_path / "modeling_own.py").write_text(MODEL_CODE)

    ours = Session(load(tmp_path, trusts_code=True)).step({0: LONG.other}, logit_rows=LogitRows.ALL)

    assert_same([ours], [hf_logits(hf, LONG.other).tanh()])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_random_weights_need_a_config_only(tmp_path: Path, dtype: str) -> None:
    save(CASES["ernie4_5_moe"], tmp_path)
    (tmp_path / "model.safetensors").unlink()

    llm = LLM(str(tmp_path), load_format="dummy", device="cpu", data_type=dtype, max_total_token_num=512)

    generated = llm.generate([LONG.other, [7, 8]], max_new_tokens=5, temperature=0, ignore_eos=True)
    assert [len(generation.token_ids) for generation in generated] == [5, 5]


def test_drafts_do_not_change_the_text(tmp_path: Path) -> None:
    save(CASES["helium"], tmp_path)
    drafts = '{"method": "ngram", "num_speculative_tokens": 3}'
    prompts = [[5, 6, 7, 8] * 10, [9, 3, 4]]

    texts = [
        LLM(str(tmp_path), device="cpu", max_total_token_num=1024, speculative_config=config).generate(
            prompts, max_new_tokens=30, temperature=0, ignore_eos=True
        )
        for config in (None, drafts)
    ]

    assert [one.token_ids for one in texts[0]] == [one.token_ids for one in texts[1]]
