"""Replicas on a Ray cluster. ``app`` is for ``serve run lightserve.ray:app model_dir=DIR replicas=2``."""

from __future__ import annotations

from typing import Any


def app(args: dict[str, str]) -> Any:
    """An application of Ray Serve that makes a deployment and ends it. Keys are flags of ``lightserve deploy``."""
    from lightserve.ray.serve_app import build  # here, because Ray is an extra

    return build(args)
