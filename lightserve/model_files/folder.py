"""What an HF model folder holds: JSON files, chat templates, weight files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.safetensors_header import tensor_bytes


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFilesError(f"{path}: no such file; the model folder is incomplete, fetch it again") from error
    except (ValueError, OSError) as error:
        raise ModelFilesError(f"{path}: not readable as JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path}: holds a JSON {type(content).__name__}, wanted an object; fetch it again")
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def eos_ids_of(path: Path) -> set[int]:
    """``eos_token_id`` of a config, which may be missing, null, one id or a list."""
    found = read_json_if_there(path).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ModelFilesError(f"{path}: eos_token_id is {found!r}, wanted an integer or a list of them; correct it")
    return set(ids)


def read_chat_template(folder: Path) -> str | None:
    """The template, from the place that wins in transformers: its own file, then the two JSON files."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json_if_there(folder / name).get("chat_template")
        if isinstance(template, list):  # older files name several: [{"name": "default", "template": ...}, ...]
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if template is not None:
            return str(template)
    return None


def find_weight_files(folder: Path) -> list[Path]:
    """Safetensors if there are any, else PyTorch's ``.bin``."""
    files = (
        _shards(folder / "model.safetensors.index.json")
        or _existing(folder / "model.safetensors")
        or sorted(folder.glob("model*.safetensors"))
        or _shards(folder / "pytorch_model.bin.index.json")
        or _existing(folder / "pytorch_model.bin")
    )
    if not files:
        raise ModelFilesError(f"{folder}: no weights (model*.safetensors or pytorch_model*.bin); fetch them again")
    for file in files:
        if file.suffix == ".safetensors":
            tensor_bytes(file)
    return files


def _existing(path: Path) -> list[Path]:
    return [path] if path.is_file() else []


def _shards(index: Path) -> list[Path]:
    if not index.is_file():
        return []
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFilesError(f"{index}: names no shard files under weight_map; fetch it again")
    shards = [index.parent / name for name in sorted(set(weight_map.values()))]
    for shard in shards:
        if shard.parent != index.parent:
            raise ModelFilesError(f"{index}: names {shard}, which lies outside the folder; fetch the model again")
        if not shard.is_file():
            raise ModelFilesError(f"{index}: names {shard.name}, which is missing; fetch that file again")
    return shards
