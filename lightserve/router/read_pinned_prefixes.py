"""Reads --pinned_prefixes for the router, which has no tokenizer otherwise, and does not keep this one."""

from __future__ import annotations

from lightserve.config import ServerConfig
from lightserve.model_files.source import resolve


def load_pinned_prefixes(config: ServerConfig) -> dict[str, list[int]]:
    """The token ids of each by its name; none without the flag."""
    path, worker = config.router.pinned_prefixes, config.worker
    if path is None:
        return {}
    # here, because other routers need no Jinja
    from lightserve.model_files.pinned_prefixes import encode_pinned_prefixes
    from lightserve.model_files.tokenizer.tokenizer import load_tokenizer_or_none

    source = resolve(worker.model_dir, needs_weights=False, trusts_code=worker.trust_remote_code)
    return encode_pinned_prefixes(path, load_tokenizer_or_none(source))
