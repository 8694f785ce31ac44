"""A small library in C, compiled when it is first needed. Triton needs a compiler too, so GPU servers have one."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-shared", "-fPIC")
TIMEOUT_S = 60.0


def library_of(source: Path) -> Path | None:
    """The file of the library, which stays for later processes. None, with a warning, if nothing compiles it."""
    digest = sha256(source.read_bytes()).hexdigest()[:16]
    name = f"{source.stem}-{platform.machine()}-{digest}.so"
    for folder in (_cache_folder(), None):
        try:
            return _compiled(source, name, folder or Path(tempfile.mkdtemp(prefix="lightserve-")))
        except OSError as error:  # the folder is read-only, or on a disk from which nothing may be run
            logger.info("%s cannot be compiled in %s: %s", source.name, folder, error)
        except subprocess.SubprocessError as error:
            detail = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
            logger.warning("%s does not compile: %s %s", source.name, error, detail)
            return None
    return None


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "lightserve"


def _compiled(source: Path, name: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / name
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:  # several ranks may compile it at once
            made = Path(work) / name
            command = [_compiler(), *FLAGS, "-o", str(made), str(source), "-ldl", "-lpthread"]
            subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
            os.replace(made, library)
    ctypes.CDLL(str(library))
    return library


def _compiler() -> str:
    wanted = (os.environ.get("CC", "").split() or [""])[0]
    compiler = next(filter(None, map(shutil.which, (wanted, *COMPILERS))), None)
    if compiler is None:
        raise subprocess.SubprocessError(f"there is no C compiler ({', '.join(COMPILERS)})")
    return compiler
