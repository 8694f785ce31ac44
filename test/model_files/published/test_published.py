"""Folders as they are published: which --tp they can have, and which tokens surround a text.

``folders`` has facts of each folder: values of config.json, of tokenizer_config.json and of the post-processor in
tokenizer.json, for some also the tensors of the first layer or the name of a linear in an adapter. ``source`` says
where the facts are from; "memory": nobody has compared them with the files yet. ``quantized.json`` has folders that
differ from another one in their ``quantization_config`` only.

``expected.json`` has one line for each folder: ``tp`` that are served, a part of the message for the others, and how
a text is encoded.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend, models, pre_tokenizers, processors

from lightserve.common.basemodel import ModelArgs, Parallel, RankGroup, TpPartBaseModel
from lightserve.common.basemodel.layer_weights.layer_weight import LayerWeight
from lightserve.errors import LightserveError
from lightserve.model_files import Tokenizer, load_tokenizer, resolve
from lightserve.model_files.pooling import read_pooling
from lightserve.model_files.tokenizer.special_tokens import set_surrounding_tokens
from lightserve.models.registry import get_model_class, read_model_config

HERE = Path(__file__).parent
META = torch.device("meta")
SIZES = (1, 2, 4, 8)
Json = dict[str, Any]

QUANTIZED: dict[str, Json] = json.loads((HERE / "quantized.json").read_text(encoding="utf-8"))
FLOAT: dict[str, Json] = {
    name: folder
    for path in sorted((HERE / "folders").glob("*.json"))
    for name, folder in json.loads(path.read_text(encoding="utf-8")).items()
}
FOLDERS = FLOAT | {
    name: {
        "source": folder["source"],
        "config": {**FLOAT[folder["like"]]["config"], "quantization_config": folder["quantization_config"]},
    }
    for name, folder in QUANTIZED.items()
}
EXPECTED: dict[str, Json] = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))


def declare(folder: Json, tp: int) -> tuple[TpPartBaseModel, list[LayerWeight]]:
    """The model of the first rank, and its weights on the meta device. Raises if it cannot be served."""
    config = read_model_config(folder["config"], None)
    pooling = read_pooling(folder["config"], None)
    model_class = get_model_class(config.model_type)
    model = model_class.__new__(model_class)
    parallel = Parallel(tp=RankGroup(0, tp))
    model._init_args(ModelArgs(config, torch.bfloat16, META, parallel, None, 1, 1, 1, pooling=pooling))
    pre_post, layers = model._new_weights(META)
    return model, [pre_post, *layers]


def refusal(folder: Json, tp: int) -> str | None:
    try:
        declare(folder, tp)
    except LightserveError as error:
        return str(error)
    return None


@functools.cache
def first_rank(name: str) -> tuple[TpPartBaseModel, list[LayerWeight]]:
    return declare(FOLDERS[name], 1)


def test_every_folder_has_an_expectation_and_a_source() -> None:
    assert sorted(FOLDERS) == sorted(EXPECTED)
    assert {folder["source"] for folder in FOLDERS.values()} <= {"memory", "hub"}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_folder_is_served_with_these_tp(name: str) -> None:
    refusals = {tp: refusal(FOLDERS[name], tp) for tp in SIZES}

    assert [tp for tp, message in refusals.items() if message is None] == EXPECTED[name]["tp"]
    for message in refusals.values():
        assert message is None or EXPECTED[name]["refused"] in message


@pytest.mark.parametrize("name", [name for name, folder in FOLDERS.items() if "tensors" in folder])
def test_the_first_layer_has_the_published_tensors(name: str) -> None:
    model, (_, first, *_) = first_rank(name)

    declared = {piece.name: list(piece.shape) for piece in first.pieces()}

    published = FOLDERS[name]["tensors"]
    assert {model.own_name(tensor): shape for tensor, shape in published.items()} == declared


@pytest.mark.parametrize("name", [name for name, folder in FOLDERS.items() if "adapter" in folder])
def test_a_linear_of_a_published_adapter_is_in_the_model(name: str) -> None:
    model, weights = first_rank(name)

    modules = {piece.name.removesuffix(".weight") for weight in weights for piece in weight.pieces()}

    assert model.own_name(FOLDERS[name]["adapter"]) in modules


@pytest.mark.parametrize("name", [name for name, folder in FOLDERS.items() if "tokenizer" in folder])
def test_a_text_has_the_tokens_around_it_that_the_model_was_published_with(name: str, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, FOLDERS[name]["tokenizer"])

    tokens = [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode("text")]

    assert " ".join(map(str, tokens)) == EXPECTED[name]["text"]


def write_tokenizer(folder: Path, facts: Json) -> Tokenizer:
    """A tokenizer of one word with the settings of a published one."""
    config = {key: value for key, value in facts.items() if key != "post_processor"}
    kind = facts["post_processor"]
    before, _, after = kind.partition("$A")
    special = [*before.split(), *after.split()] if "$A" in kind else []
    special += [token for token in (facts["bos_token"], facts["eos_token"]) if token is not None]
    backend = Backend(models.WordLevel({"text": 0}, unk_token="text"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(list(dict.fromkeys(special)))
    if "$A" in kind:
        set_surrounding_tokens(backend, before.split(), after.split())
    elif kind != "none":
        backend.post_processor = getattr(processors, kind)()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return load_tokenizer(resolve(str(folder), needs_weights=False))
