"""One model in the cache that Hugging Face's tools share: contents by digest, and snapshots that link to them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from lightserve.model_files.hub.listing import HubFile
from lightserve.model_files.hub.name import DEFAULT_REVISION, HubName


@dataclass(frozen=True, slots=True)
class CachedRepo:
    cache: Path
    repo: str

    @property
    def folder(self) -> Path:
        return self.cache / self._folder_name

    @property
    def lock(self) -> Path:
        return self.cache / ".locks" / self._folder_name / "lightserve.lock"

    @property
    def _folder_name(self) -> str:
        return f"models--{self.repo.replace('/', '--')}"

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def blob(self, file: HubFile) -> Path:
        return self.folder / "blobs" / file.digest

    def partial(self, file: HubFile) -> Path:
        """What an interrupted download has left."""
        return self.folder / "blobs" / f"{file.digest}.incomplete"

    def has(self, commit: str, file: HubFile) -> bool:
        return _has_size(self.snapshot(commit) / file.path, file.size)

    def has_blob(self, file: HubFile) -> bool:
        return _has_size(self.blob(file), file.size)

    def bytes_left(self, file: HubFile) -> int:
        """How much of the file must still be downloaded."""
        if self.has_blob(file):
            return 0
        partial = self.partial(file)
        return file.size - min(file.size, partial.stat().st_size if partial.is_file() else 0)

    def remove_damaged(self, commit: str, file: HubFile) -> None:
        """Remove a link or a blob whose size is wrong, so that it is downloaded again."""
        link = self.snapshot(commit) / file.path
        if link.is_file() and not self.has(commit, file):
            link.unlink()
        if self.blob(file).is_file() and not self.has_blob(file):
            self.blob(file).unlink()

    def find_snapshot(self, name: HubName) -> Path | None:
        """The newest snapshot of the revision that was downloaded, without asking the hub."""
        ref = self.folder / "refs" / name.revision
        commit = ref.read_text().strip() if ref.is_file() else name.revision
        if self.snapshot(commit).is_dir():
            return self.snapshot(commit)
        snapshots = sorted(self.folder.glob("snapshots/*"))
        is_only_one = len(snapshots) == 1 and not ref.is_file() and name.revision == DEFAULT_REVISION
        return snapshots[0] if is_only_one else None

    def has_ref(self, revision: str) -> bool:
        return (self.folder / "refs" / revision).is_file()

    def write_ref(self, revision: str, commit: str) -> None:
        """Remember which commit a branch was at, for starts without a network."""
        ref = self.folder / "refs" / revision
        if revision == commit or (ref.is_file() and ref.read_text() == commit):
            return
        with contextlib.suppress(OSError):  # a complete cache may be read-only
            ref.parent.mkdir(parents=True, exist_ok=True)
            temporary = ref.with_name(f"{ref.name}.new")
            temporary.write_text(commit)
            temporary.replace(ref)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
