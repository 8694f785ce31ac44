"""``inputs`` and ``multimodal_params``, which LightLLM's and TGI's bodies share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightserve.errors import InvalidRequestError, TextOnlyError
from lightserve.httpserver.context import ServerContext


def check_input_ids(context: ServerContext, ids: Sequence[int]) -> None:
    if not ids:
        raise InvalidRequestError("`inputs` cannot be empty", "inputs")
    context.manager.check_ids("inputs", ids)


def refuse_media(params: Mapping[str, Any] | None) -> None:
    """``multimodal_params`` holds lists of images and the like, which may be empty."""
    for kind, items in (params or {}).items():
        if items:
            raise TextOnlyError(f"`multimodal_params.{kind[:100]}`", "multimodal_params")
