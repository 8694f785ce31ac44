"""A model in several GGUF files is the model of one file."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightserve.common.checkpoint.reader import open_checkpoint, tensor_metadata, total_bytes
from lightserve.errors import ModelFilesError
from lightserve.model_files import resolve
from lightserve.model_files.gguf.shards import model_stem, shard_names
from lightserve.model_files.source import GgufSource
from test.model_files.files import save_as_gguf, tiny_model


def split(folder: Path, tensors_of_a_file: int = 8) -> list[Path]:
    """The files of a tiny Llama."""
    folder.mkdir(exist_ok=True)
    save_as_gguf(tiny_model("llama"), folder / "tiny.gguf", split_max_tensors=tensors_of_a_file)
    return sorted(folder.iterdir())


def refusal(path: Path) -> str:
    with pytest.raises(ModelFilesError) as caught:
        resolve(str(path))
    return str(caught.value)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_split_model_has_the_config_and_the_tensors_of_the_whole(tmp_path: Path, is_packed: bool) -> None:
    files = split(tmp_path / "split")
    parts, whole = resolve(str(files[0])), resolve(str(save_as_gguf(tiny_model("llama"), tmp_path / "whole.gguf")))
    assert isinstance(parts, GgufSource)
    assert isinstance(whole, GgufSource)
    parts, whole = replace(parts, is_packed=is_packed), replace(whole, is_packed=is_packed)

    ours, theirs = ({name: tensor for name, tensor, _ in open_checkpoint(source)} for source in (parts, whole))

    assert len(files) > 2
    assert parts.weight_files() == files
    assert parts.hf_config() == whole.hf_config()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [meta.name for meta in tensor_metadata(parts)] == list(ours)
    assert total_bytes(parts) == total_bytes(whole)


def test_any_file_of_a_model_and_its_folder_stand_for_it(tmp_path: Path) -> None:
    files = split(tmp_path / "folder")

    for file in files:
        source = resolve(str(file))
        assert (source.name, source.path, source.weight_files()) == ("tiny", files[0], files)
    assert resolve(str(tmp_path / "folder")).weight_files() == files


def test_missing_files_are_named(tmp_path: Path) -> None:
    first, second, *_, last = split(tmp_path)
    second.unlink()
    assert f"{last}: the model is split into" in refusal(last)
    assert f"files; {second.name} not found beside it" in refusal(last)

    first.unlink()
    assert f"{first.name}, {second.name} not found" in refusal(last)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    first, second, *_ = split(tmp_path)
    second.write_bytes(second.read_bytes()[:-100])

    assert refusal(first).startswith(f"{second}: the GGUF file is truncated")


def test_files_that_are_not_of_one_model_are_refused(tmp_path: Path) -> None:
    first, second, third, *_ = split(tmp_path)
    shutil.copy(second, third)

    assert "they are not of one model" in refusal(first)


def test_files_of_other_names_are_refused(tmp_path: Path) -> None:
    files = split(tmp_path)
    renamed = files[0].rename(tmp_path / "tiny.part1.gguf")

    assert f"names must end with -00001-of-{len(files):05}.gguf" in refusal(renamed)


@pytest.mark.parametrize(
    ("name", "names", "stem"),
    [
        ("a.gguf", ["a.gguf"], "a"),
        ("a-00002-of-00002.gguf", ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], "a"),
        ("Q4/a-00001-of-00001.gguf", ["Q4/a-00001-of-00001.gguf"], "Q4/a"),
        ("a-00000-of-00000.gguf", ["a-00000-of-00000.gguf"], "a"),
        ("a-1-of-2.gguf", ["a-1-of-2.gguf"], "a-1-of-2"),
    ],
)
def test_names_of_shards_tell_the_others(name: str, names: list[str], stem: str) -> None:
    assert (shard_names(name), model_stem(name)) == (names, stem)
