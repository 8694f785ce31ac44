"""Reads --static_prompts for the router, which has no tokenizer otherwise, and does not keep this one."""

from __future__ import annotations

from lightserve.config import ServerConfig
from lightserve.model_files.source import resolve
from lightserve.model_files.static_prompts import encode_static_prompts
from lightserve.model_files.tokenizer.tokenizer import load_tokenizer_or_none


def load_static_prompts(config: ServerConfig) -> dict[str, list[int]]:
    """The token ids of each by its name; none without the flag."""
    path, worker = config.router.static_prompts, config.worker
    if path is None:
        return {}
    source = resolve(worker.model_dir, needs_weights=False, trusts_code=worker.trust_remote_code)
    return encode_static_prompts(path, load_tokenizer_or_none(source))
