"""--engines_file: the addresses of engines, one per line. Whoever writes it adds and removes engines at run time."""

from __future__ import annotations

import os
from pathlib import Path

from lightserve.config import check_addresses
from lightserve.errors import OptionError
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)


def read_engines_file(path: str) -> list[str]:
    """The addresses, without empty lines and # comments. Raises an OptionError that names the file."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--engines_file: cannot read {path} ({error}); write one tcp://HOST:PORT per line"
        ) from error
    addresses = [line for line in lines if line and not line.startswith("#")]
    check_addresses(path, addresses)
    return addresses


def write_engines_file(path: Path, addresses: list[str]) -> None:
    """A gateway reads the old content or the new one, never a part."""
    written = path.with_suffix(".new")
    written.write_text("".join(f"{address}\n" for address in addresses))
    os.replace(written, path)


class EnginesFile:
    """Reads the file again when asked. While it is missing or wrong, the addresses stay as they are."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._addresses: list[str] = []
        self._last_error = ""

    def read(self) -> list[str]:
        try:
            self._addresses, self._last_error = read_engines_file(self._path), ""
        except OptionError as error:
            if str(error) != self._last_error:
                logger.error("%s; the engines stay as they are", error)
            self._last_error = str(error)
        return self._addresses
