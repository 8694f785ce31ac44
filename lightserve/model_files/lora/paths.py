"""Which folders clients may load adapters from: only those below --lora_dir, also after symbolic links."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from lightserve.errors import AdapterError
from lightserve.model_files.lora.adapter import WEIGHTS_FILE
from lightserve.model_files.lora.config import CONFIG_FILE

MAX_NAME = 256  # characters
READ_BYTES = 1 << 22


class FileVersion(NamedTuple):
    """Changes when a file is written again."""

    inode: int
    size: int
    modified_ns: int


def adapter_files(folder: Path) -> list[Path]:
    """All that an adapter depends on."""
    return [folder / name for name in (CONFIG_FILE, WEIGHTS_FILE)]


def content_digest(folder: Path) -> str:
    """Of the whole content of an adapter's files. A core reads about 1 GB/s."""
    digest = blake2b(digest_size=16)
    for path in adapter_files(folder):
        with path.open("rb") as file:
            while piece := file.read(READ_BYTES):
                digest.update(piece)
        digest.update(path.name.encode())
    return digest.hexdigest()


def folder_below(root: str, given: str) -> Path:
    """The folder ``given`` of an adapter, which must be below ``root``, with all of its files. Links are resolved."""
    try:
        base = Path(root).resolve()
        folder = (base / given).resolve()
        files = [path.resolve() for path in adapter_files(folder)]
    except (OSError, ValueError, RuntimeError) as error:
        raise AdapterError(f"{given[:MAX_NAME]!r} is not a folder below --lora_dir") from error
    is_below = folder != base and all(path.is_relative_to(base) for path in (folder, *files))
    if not is_below:
        raise AdapterError(f"{given[:MAX_NAME]!r} is not below --lora_dir; copy the adapter there")
    return folder


def path_below(root: str | None, folder: Path) -> str | None:
    """The path of ``folder`` from ``root``; None: it is not below."""
    base = None if root is None else Path(root).resolve()
    return None if base is None or not folder.is_relative_to(base) else str(folder.relative_to(base))


def has_adapter(folder: Path) -> bool:
    try:
        return (folder / CONFIG_FILE).is_file()
    except OSError:
        return False


def versions(folder: Path) -> tuple[FileVersion, ...]:
    """Of the files of an adapter: equal as long as nobody writes them. Files that are not there are left out."""
    file_versions = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            stat = (folder / name).stat()
        except OSError:
            continue
        file_versions.append(FileVersion(stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(file_versions)


def parse_module(text: str) -> tuple[str, str]:
    """``name=path`` of --lora_modules."""
    name, separator, path = text.partition("=")
    if not separator or not path:
        raise AdapterError(f"lora_modules={text!r}: must be name=path")
    check_name(name)
    return name, path


def check_name(name: str) -> None:
    if not name or len(name) > MAX_NAME or not name.isprintable() or name != name.strip():
        raise AdapterError(
            f"lora_name {name[:MAX_NAME]!r}: must have 1 to {MAX_NAME} printable characters, without spaces around them"
        )
