"""How a model of the hub is written: ``org/model``, ``org/model@revision``, ``org/model:file.gguf``."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_REVISION = "main"
MAX_LENGTH = 96  # the hub's limit
_SEGMENT = r"[A-Za-z0-9_](?:[\w.-]*[\w])?"
_NAME = re.compile(
    rf"(?P<repo>{_SEGMENT}(?:/{_SEGMENT})?)(?:@(?P<revision>[\w.+/-]+))?(?::(?P<file>[\w.+/ -]+\.gguf))?", re.ASCII
)
_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".json")


@dataclass(frozen=True, slots=True)
class HubName:
    repo: str
    revision: str = DEFAULT_REVISION  # a branch, a tag or a commit
    file: str | None = None  # the .gguf file to serve

    @property
    def label(self) -> str:
        """The model's name for clients."""
        return self.repo if self.file is None else f"{self.repo}:{self.file}"

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repo}{revision}" + (f":{self.file}" if self.file else "")


def parse_hub_name(text: str) -> HubName | None:
    """None if the hub can have no model of that name: then it is meant as a path."""
    match = _NAME.fullmatch(text)
    if match is None or ".." in text or "//" in text or text.endswith("/"):
        return None
    repo, revision, file = match["repo"], match["revision"], match["file"]
    if len(repo) > MAX_LENGTH or "--" in repo:
        return None
    if repo.lower().endswith(_FILE_ENDINGS) or any(field and field.startswith("/") for field in (revision, file)):
        return None
    return HubName(repo, revision or DEFAULT_REVISION, file)
