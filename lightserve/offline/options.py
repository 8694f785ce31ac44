"""Options of LLM under the names that other servers have for them: tensor_parallel_size, model.

A JSON object may be a dict: speculative_config={"method": "ngram"}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lightserve.config import WorkerConfig
from lightserve.errors import OptionError
from lightserve.utils.spelling import nearest


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options under the names of WorkerConfig."""
    names = {name: spec.name for spec in fields(WorkerConfig) for name in (spec.name, *spec.metadata["aliases"])}
    known: dict[str, Any] = {}
    for name, value in options.items():
        if name not in names:
            guess = nearest(name, names)
            raise OptionError(f"LLM has no option {name}" + (f"; did you mean {guess}?" if guess else ""))
        if known.get(names[name]) is not None:
            raise OptionError(f"{names[name]} and {name} are the same option; give one")
        known[names[name]] = json.dumps(value) if isinstance(value, Mapping) else value
    return known
