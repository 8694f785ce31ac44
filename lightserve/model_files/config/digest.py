"""A digest of config.json, which several machines can compare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

UNIMPORTANT = ("_name_or_path", "transformers_version")  # keys that say where it comes from


def config_digest(hf: Mapping[str, Any]) -> str:
    important = {key: value for key, value in hf.items() if key not in UNIMPORTANT}
    return blake2b(json.dumps(important, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
