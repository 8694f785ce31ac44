"""API keys from files: neither ps nor the shell's history shows them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightserve.config import ServerConfig
from lightserve.errors import ServerError
from lightserve.utils.key_spec import parse_key
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

KEY_VARIABLE = "LIGHTSERVE_API_KEY"
READABLE_BY_OTHERS = 0o077


def with_keys(config: ServerConfig) -> ServerConfig:
    """Return the config with the keys of --api_key_file, --admin_key_file and LIGHTSERVE_API_KEY added."""
    http = config.http
    in_environment = [key for key in (os.environ.get(KEY_VARIABLE),) if key]
    api_key = [*http.api_key, *_read("api_key_file", http.api_key_file), *in_environment]
    admin_key = [*http.admin_key, *_read("admin_key_file", http.admin_key_file)]
    _check(api_key)
    _check(admin_key)
    return replace(config, http=replace(http, api_key=api_key, admin_key=admin_key))


def _check(keys: Sequence[str]) -> None:
    """What follows a key. The error does not show it."""
    for number, text in enumerate(keys, start=1):
        try:
            parse_key(text)
        except ValueError as error:
            raise ServerError(f"API key {number}: {error}") from error


def _read(flag: str, filename: str | None) -> list[str]:
    """One key per line, without empty lines and # comments. A file without keys is an error: anyone could enter."""
    if filename is None:
        return []
    path = Path(filename).expanduser()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise ServerError(f"--{flag}: cannot read {path} ({error}); use a text file with one key per line") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ServerError(f"--{flag}: {path} contains no key; write one key per line")
    if mode & READABLE_BY_OTHERS:
        logger.warning("--%s: other users can read %s; protect it with chmod 600", flag, path)
    return keys
