"""What the files of a model say about the images that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.folder import read_json
from lightserve.model_files.source import FolderSource, ModelSource

PREPROCESSOR = "preprocessor_config.json"
VISION_TYPES = ("qwen2_vl", "qwen2_5_vl")  # whose images are read; of the others the language model is served


def reads_images(hf: Mapping[str, Any]) -> bool:
    return hf.get("multimodal_type") in VISION_TYPES


def read_image_files(source: ModelSource) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """preprocessor_config.json, and vision_config of config.json."""
    vision = source.hf_config().get("vision_config")
    if not isinstance(vision, dict):
        raise ModelFilesError(f"{source.path}: config.json has no vision_config; fetch it again")
    return read_json(source.path / PREPROCESSOR), vision


def placeholder_of(source: ModelSource) -> int:
    """The token id that stands for an image in a prompt."""
    token_id = source.hf_config().get("image_token_id")
    if not isinstance(token_id, int):
        raise ModelFilesError(f"{source.path}: config.json has no image_token_id; fetch it again")
    return token_id


def pair_around(source: ModelSource) -> tuple[int, int] | None:
    """The token ids before and after an image in a prompt; None: it has none, or config.json does not tell."""
    hf = source.hf_config()
    start, end = hf.get("vision_start_token_id"), hf.get("vision_end_token_id")
    return (start, end) if isinstance(start, int) and isinstance(end, int) else None


def has_image_files(source: ModelSource) -> bool:
    return isinstance(source, FolderSource) and (source.path / PREPROCESSOR).is_file()
