"""Which folders a trainer may have weights loaded from: only those below --weights_dir, also after symbolic links."""

from __future__ import annotations

from pathlib import Path

from lightserve.errors import InvalidRequestError

SHOWN = 256  # characters of a path in a message


def weights_folder(root: str | None, given: str) -> Path:
    """The folder ``given``, with all of its files below ``root``. A relative path begins there."""
    shown = given[:SHOWN]
    if root is None:
        raise InvalidRequestError("this server loads no weights from folders; start it with --weights_dir FOLDER")
    base = Path(root).absolute()
    try:
        base = base.resolve()
        folder = (base / given).resolve()
        files = [path.resolve() for path in folder.iterdir()] if folder.is_relative_to(base) else []
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(f"{shown!r} is not a folder below --weights_dir ({base})") from error
    if not folder.is_relative_to(base) or not all(path.is_relative_to(base) for path in files):
        raise InvalidRequestError(f"{shown!r} is not below --weights_dir ({base}); write the weights there")
    return folder
