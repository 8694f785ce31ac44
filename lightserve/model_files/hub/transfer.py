"""Downloads files into the cache: each continues where it broke off, and its digest is checked."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.hub.bar import StoppedError, bar_class
from lightserve.model_files.hub.cache import CachedRepo
from lightserve.model_files.hub.default_model import exclusive_lock
from lightserve.model_files.hub.errors import http_error
from lightserve.model_files.hub.listing import TIMEOUT_S, HubFile
from lightserve.model_files.hub.name import HubName
from lightserve.model_files.hub.settings import HubSettings
from lightserve.utils.logger import init_logger
from lightserve.utils.progress import Progress, format_bytes

logger = init_logger(__name__)

CONNECTIONS = 4  # files at a time over HTTP; each is resumed, so none is lost
MAX_ATTEMPTS = 5  # without any progress; huggingface_hub itself retries some errors


@dataclass(frozen=True)
class Transfer:
    """Downloads files of one commit."""

    name: HubName
    commit: str
    settings: HubSettings
    _stop: threading.Event = field(default_factory=threading.Event)
    # Xet downloads one file at a time, as an unfinished one is lost.
    _xet_turn: threading.Lock = field(default_factory=threading.Lock)

    @property
    def _repo(self) -> CachedRepo:
        return CachedRepo(self.settings.cache, self.name.repo)

    def missing(self, files: Sequence[HubFile]) -> list[HubFile]:
        return [file for file in files if not self._repo.has(self.commit, file)]

    def run(self, files: Sequence[HubFile], shows_progress: bool = True) -> None:
        """Download those of ``files`` that are missing. The first process downloads while the others wait."""
        if not self.missing(files):
            return
        self._repo.lock.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(self._repo.lock):
            missing = self.missing(files)
            for file in missing:
                self._repo.remove_damaged(self.commit, file)
            left = sum(map(self._repo.bytes_left, missing))
            self._check_disk_space(left)
            total = sum(file.size for file in missing)
            stream = None if shows_progress else io.StringIO()
            with Progress(f"downloading {self.name}", total, stream) as progress, _quiet_library():
                progress.resume_at(total - left)
                self._download(missing, bar_class(progress, self._stop))

    def _check_disk_space(self, n_bytes: int) -> None:
        free = shutil.disk_usage(self._repo.lock.parent).free
        if n_bytes > free:
            raise ModelFilesError(
                f"{self.name}: {format_bytes(n_bytes)} must be downloaded, but {self.settings.cache} has only "
                f"{format_bytes(free)} free; free some, or set HF_HOME to a folder on another disk"
            )

    def _download(self, files: Sequence[HubFile], bar: type[Any]) -> None:
        small_first = sorted(files, key=lambda file: file.size)
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            futures = [pool.submit(self._download_file, file, bar) for file in small_first]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                _stop_xet()
                raise

    def _download_file(self, file: HubFile, bar: type[Any]) -> None:
        if self._stop.is_set():
            raise StoppedError
        is_done = not self._repo.has_blob(file) and self._uses_xet(file) and self._download_with_xet(file, bar)
        if not is_done:
            self._download_blob(file, bar)
            self._link(file, bar)
        if not self._repo.has(self.commit, file):
            raise _wrong_content(self.name, file, "another size")

    def _download_with_xet(self, file: HubFile, bar: type[Any]) -> bool:
        """Return False if hf_xet fails, as behind a firewall that lets only the hub through."""
        try:
            with self._xet_turn:
                self._link(file, bar)
            return True
        except (ModelFilesError, StoppedError):
            raise
        except Exception as error:  # it raises what its Rust code reports, of any class
            if self._stop.is_set():
                raise StoppedError from error
            reason = " ".join(str(error).split())[:200]
            logger.warning("%s: hf_xet failed (%s); continuing over HTTP", file.path, reason)
            return False

    def _uses_xet(self, file: HubFile) -> bool:
        """Whether hf_xet can download the file: over many connections, but always from its start."""
        from huggingface_hub import constants, get_hf_file_metadata

        is_available = find_spec("hf_xet") is not None and not constants.HF_HUB_DISABLE_XET
        if not (is_available and file.is_large) or self._repo.partial(file).is_file():
            return False
        metadata = get_hf_file_metadata(self._url(file), timeout=TIMEOUT_S, endpoint=self.settings.endpoint)
        return metadata.xet_file_data is not None

    def _link(self, file: HubFile, bar: type[Any]) -> None:
        """Let huggingface_hub add the file to the snapshot. It downloads a file that has no blob yet, as with Xet."""
        from huggingface_hub import hf_hub_download

        had_blob = self._repo.has_blob(file)
        path = hf_hub_download(
            self.name.repo,
            file.path,
            revision=self.commit,
            cache_dir=self.settings.cache,
            endpoint=self.settings.endpoint,
            tqdm_class=bar,
        )
        if not had_blob:
            _check_digest(self.name, file, Path(path))

    def _download_blob(self, file: HubFile, bar: type[Any]) -> None:
        if self._repo.has_blob(file):
            return
        partial = self._repo.partial(file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        if partial.is_file() and partial.stat().st_size > file.size:
            partial.unlink()
        self._download_in_attempts(file, partial, bar)
        _check_digest(self.name, file, partial)
        partial.replace(self._repo.blob(file))

    def _download_in_attempts(self, file: HubFile, partial: Path, bar: type[Any]) -> None:
        from huggingface_hub.errors import HfHubHTTPError

        failures = 0
        is_complete = 0 < file.size <= _size_of(partial)
        while not is_complete:
            before = _size_of(partial)
            try:
                self._continue(file, partial, bar)
                is_complete = True
            except http_error() as error:
                failures = 0 if _size_of(partial) > before else failures + 1
                if isinstance(error, HfHubHTTPError) or failures >= MAX_ATTEMPTS:
                    raise
                logger.info("%s: continuing after %s", file.path, type(error).__name__)

    def _continue(self, file: HubFile, partial: Path, bar: type[Any]) -> None:
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        resume_size = _size_of(partial)
        with partial.open("ab") as stream:
            http_get(
                self._url(file),
                stream,
                resume_size=resume_size,
                headers=build_hf_headers(library_name="lightserve"),
                tqdm_class=bar,
            )

    def _url(self, file: HubFile) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.name.repo, file.path, revision=self.commit, endpoint=self.settings.endpoint)


@contextmanager
def _quiet_library() -> Iterator[None]:
    """huggingface_hub logs each retry over several lines, between those of the progress."""
    library = logging.getLogger("huggingface_hub")
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.setLevel(level)


def _stop_xet() -> None:
    """Its downloads run in threads of its own, which do not see the exception."""
    with contextlib.suppress(ImportError):
        from huggingface_hub.utils._xet import abort_xet_session

        abort_xet_session()  # type: ignore[no-untyped-call]


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _check_digest(name: HubName, file: HubFile, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as stream:
        if file.is_large:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        else:  # as git computes it
            head = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
            digest = hashlib.file_digest(stream, lambda: head).hexdigest()
    if (size, digest) == (file.size, file.digest):
        return
    _unlink_with_target(path)
    raise _wrong_content(name, file, f"{size} bytes with digest {digest[:16]}...")


def _unlink_with_target(path: Path) -> None:
    """Remove a file, or a link, the link that it may lead to, and the file at the end."""
    if path.is_symlink():
        _unlink_with_target(path.parent / path.readlink())
    path.unlink()


def _wrong_content(name: HubName, file: HubFile, content: str) -> ModelFilesError:
    return ModelFilesError(
        f"{name}: {file.path} arrived with {content}, instead of {file.size} bytes with digest {file.digest[:16]}...; "
        "it was deleted: start again; if that fails too, a proxy or a mirror serves a different file"
    )
