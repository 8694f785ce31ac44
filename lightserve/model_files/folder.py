"""The files of a Hugging Face model folder: JSON files, chat templates, weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.safetensors_header import read_header

MAX_NAME_LENGTH = 256  # characters of a file name
# as the Python code of Qwen 1 writes it
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_END = "<|im_end|>"


def read_json(path: Path, remedy: str = "download it again") -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFilesError(f"{path}: no such file; the model folder is incomplete, {remedy}") from error
    except (ValueError, OSError, RecursionError) as error:
        raise ModelFilesError(f"{path}: not readable as JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path}: a JSON {type(content).__name__} instead of an object; {remedy}")
    return content


def read_json_if_exists(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def read_chat_templates(folder: Path) -> dict[str, str]:
    """By name, from transformers' places: files of their own replace the templates of the two JSON files."""
    paths = {"default": folder / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    files = {name: read_text(path) for name, path in paths.items() if path.is_file()}
    if "default" in files:
        return files
    for name in ("chat_template.json", "tokenizer_config.json"):
        templates = _named_templates(folder / name)
        if templates:
            return templates | files
    return files or ({"default": CHATML} if has_chatml_format(folder) else {})


def has_chatml_format(folder: Path) -> bool:
    """Chat models of Qwen 1 have no template, only the name of their format."""
    return read_json_if_exists(folder / "generation_config.json").get("chat_format") == "chatml"


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise ModelFilesError(f"{path}: not readable as text ({error}); download it again") from error


def _named_templates(path: Path) -> dict[str, str]:
    """``chat_template`` is one template, or several: {"default": ...} or [{"name": "default", "template": ...}]."""
    value = read_json_if_exists(path).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = {str(entry.get("name")): entry.get("template") for entry in entries}
    templates = value if isinstance(value, dict) else {"default": value}
    if not all(isinstance(text, str) for text in templates.values()):
        raise ModelFilesError(f"{path}: chat_template is not a string; correct it")
    return templates


def find_weight_files(folder: Path) -> list[Path]:
    """The safetensors files, or PyTorch's ``.bin`` files if there are none."""
    files = (
        _shards(folder / "model.safetensors.index.json")
        or _existing(folder / "model.safetensors")
        or [path for path in sorted(folder.glob("model*.safetensors")) if path.is_file()]
        or _shards(folder / "pytorch_model.bin.index.json")
        or _existing(folder / "pytorch_model.bin")
    )
    if not files:
        raise ModelFilesError(f"{folder}: no weights (model*.safetensors or pytorch_model*.bin); download them again")
    for file in files:
        if file.suffix == ".safetensors":
            read_header(file)
    return files


def _existing(path: Path) -> list[Path]:
    return [path] if path.is_file() else []


def _shards(index: Path) -> list[Path]:
    if not index.is_file():
        return []
    weight_map = _weight_map(index)
    shards = [index.parent / name for name in shard_names(index)]
    for shard in shards:
        if shard.parent != index.parent:
            raise ModelFilesError(f"{index}: names {shard}, which is outside the folder; download the model again")
        if not shard.is_file():
            raise ModelFilesError(f"{index}: names {shard.name}, which is missing; download that file again")
        if shard.suffix == ".safetensors":
            _check_shard(index, shard, [name for name, file in weight_map.items() if file == shard.name])
    return shards


def shard_names(index: Path) -> list[str]:
    """The files that an index names."""
    return sorted(set(_weight_map(index).values()))


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(map(_is_file_name, weight_map.values())):
        raise ModelFilesError(f"{index}: its weight_map names no shard files; download it again")
    return weight_map


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and "\0" not in name and len(name) < MAX_NAME_LENGTH


def _check_shard(index: Path, shard: Path, names: list[str]) -> None:
    missing = sorted(set(names) - read_header(shard).keys())
    if missing:
        raise ModelFilesError(
            f"{index}: {shard.name} lacks {len(missing)} tensors that the index lists, such as {missing[0][:100]}; "
            "download both files again"
        )
