"""The environment variables of Hugging Face's tools. They are read at the time of the call."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lightserve.model_files.hub.default_model import user_cache

DEFAULT_ENDPOINT = "https://huggingface.co"
_TRUE = {"1", "ON", "YES", "TRUE"}


@dataclass(frozen=True, slots=True)
class HubSettings:
    endpoint: str
    cache: Path
    is_offline: bool


def read_settings() -> HubSettings:
    endpoint = os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
    offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return HubSettings(endpoint.rstrip("/"), hub_cache(), offline.upper() in _TRUE)


def hub_cache() -> Path:
    """The same rule as Hugging Face's tools, which share the cache."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expandvars(cache)).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(os.path.expandvars(home)).expanduser() / "hub"
    return user_cache() / "huggingface" / "hub"
