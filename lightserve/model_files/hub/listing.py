"""Which files a model of the hub has at one commit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightserve.errors import ModelFilesError
from lightserve.model_files.hub.name import HubName
from lightserve.model_files.hub.settings import HubSettings

TIMEOUT_S = 10.0  # as huggingface_hub waits for the header of a file
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class HubFile(NamedTuple):
    path: str  # within the repository
    size: int
    digest: str  # SHA-256 of a file in LFS or Xet, else git's SHA-1 of a blob; the hub sends it as ETag

    @property
    def is_large(self) -> bool:
        """Whether it is in LFS or Xet."""
        return len(self.digest) == 64


@dataclass(frozen=True, slots=True)
class Listing:
    commit: str
    files: dict[str, HubFile]  # by path


def read_listing(name: HubName, settings: HubSettings) -> Listing:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=settings.endpoint, library_name="lightserve")
    info = api.model_info(name.repo, revision=name.revision, files_metadata=True, timeout=TIMEOUT_S)
    if not _COMMIT.fullmatch(info.sha or ""):
        raise ModelFilesError(f"{name}: {settings.endpoint} names no commit; is HF_ENDPOINT a hub?")
    files = {file.path: file for file in _files(info.siblings or [])}
    if not files:
        raise ModelFilesError(f"{name}: {settings.endpoint} lists no files with sizes; is HF_ENDPOINT a hub?")
    return Listing(str(info.sha), files)


def _files(siblings: list[Any]) -> Iterator[HubFile]:
    for entry in siblings:
        digest = entry.lfs.sha256 if entry.lfs else entry.blob_id
        size = entry.lfs.size if entry.lfs else entry.size
        if size is not None and _DIGEST.fullmatch(digest or "") and ".." not in entry.rfilename.split("/"):
            yield HubFile(entry.rfilename, size, digest)
