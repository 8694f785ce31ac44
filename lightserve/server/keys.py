"""Keys that are kept in files, so that neither ps nor a shell's history shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightserve.config import ServerConfig
from lightserve.errors import ServerError
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

READABLE_BY_OTHERS = 0o077


def with_keys(config: ServerConfig) -> ServerConfig:
    """The same, with the keys of the files that it names."""
    http = config.http
    api_key = [*http.api_key, *_read("api_key_file", http.api_key_file)]
    admin_key = [*http.admin_key, *_read("admin_key_file", http.admin_key_file)]
    return replace(config, http=replace(http, api_key=api_key, admin_key=admin_key))


def _read(flag: str, name: str | None) -> list[str]:
    """One key a line; empty lines and those that begin with # are none. A file without a key would open the server."""
    if name is None:
        return []
    path = Path(name).expanduser()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise ServerError(f"{flag}: {path} cannot be read ({error}); give a text file with one key a line") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ServerError(f"{flag}: {path} holds no key; write one a line")
    if mode & READABLE_BY_OTHERS:
        logger.warning("%s: other users may read %s; chmod 600 keeps the keys to yourself", flag, path)
    return keys
