"""The LoRA adapters that requests can name: those of --lora_modules, loaded ones, and folders below --lora_dir."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightserve.errors import AdapterError, ModelNotFoundError
from lightserve.model_files.lora.paths import (
    FileVersion,
    check_name,
    folder_below,
    has_adapter,
    parse_module,
    path_below,
    versions,
)

SHOWN = 100  # characters of a name in a message


@dataclass(slots=True, eq=False)
class RegisteredAdapter:
    """An adapter under a name. Whoever loads other weights under the same name gets another id."""

    lora_id: int
    name: str
    folder: Path
    shown_path: str  # for clients: from --lora_dir, or the name of the folder
    files: tuple[FileVersion, ...]  # as they were when it was registered
    is_on_demand: bool = False  # a request named a folder below --lora_dir
    digest: str = ""  # of the content of its files; empty: the workers have not loaded it yet

    @property
    def salt(self) -> str:
        """Of the prefixes that are computed with it. Others with the same files have the same one."""
        return adapter_salt(self.digest or f"{self.lora_id} not loaded")

    def for_client(self, message: str) -> str:
        """A message about its files, without the path of the folder on this machine."""
        return message.replace(str(self.folder), self.shown_path)

    def check_unchanged(self) -> None:
        """Cached prefixes were computed with the files as they were."""
        if versions(self.folder) != self.files:
            raise AdapterError(
                f"{self.folder}: the files have changed since the adapter {self.name!r} was registered; "
                "POST /v1/unload_lora_adapter, then load it again"
            )


def adapter_salt(digest: str) -> str:
    return f"lora {digest} "


class AdapterRegistry:
    def __init__(self, modules: list[str], root: str | None) -> None:
        self._root = root
        self._ids = itertools.count()
        self._by_name: dict[str, RegisteredAdapter] = {}
        for name, path in map(parse_module, modules):
            self.put(self._new(name, Path(path).resolve()))

    def __iter__(self) -> Iterator[RegisteredAdapter]:
        return iter(self._by_name.values())

    def find(self, name: str) -> RegisteredAdapter:
        """The adapter that a request names. Raises ModelNotFoundError."""
        known = self._by_name.get(name)
        if known is not None:
            return known
        folder = None if self._root is None else self._folder_of(self._root, name)
        if folder is None:
            raise not_found(name)
        adapter = self._new(name, folder, is_on_demand=True)
        self.put(adapter)
        return adapter

    def prepare(self, name: str, path: str, replaces: bool) -> RegisteredAdapter:
        """The adapter in the folder ``path`` below --lora_dir. Requests cannot name it before ``put``."""
        check_name(name)
        if self._root is None:
            raise AdapterError("this server loads no adapters while it runs; start it with --lora_dir FOLDER")
        if name in self._by_name and not replaces:
            raise AdapterError(f"the adapter {name[:SHOWN]!r} exists already; unload it, or send load_inplace: true")
        folder = folder_below(self._root, path)
        if not has_adapter(folder):
            raise AdapterError(f"{path[:SHOWN]!r}: there is no adapter_config.json in this folder of --lora_dir")
        return self._new(name, folder)

    def put(self, adapter: RegisteredAdapter) -> None:
        """Let requests use the adapter. It replaces one of the same name."""
        self._by_name[adapter.name] = adapter

    def remove(self, name: str) -> RegisteredAdapter:
        if name not in self._by_name:
            raise not_found(name)
        return self._by_name.pop(name)

    def forget(self, adapter: RegisteredAdapter) -> None:
        """It cannot be loaded. Its name may stand for another one meanwhile."""
        if self._by_name.get(adapter.name) is adapter:
            del self._by_name[adapter.name]

    def _new(self, name: str, folder: Path, is_on_demand: bool = False) -> RegisteredAdapter:
        shown = path_below(self._root, folder) or folder.name
        return RegisteredAdapter(next(self._ids), name, folder, shown, versions(folder), is_on_demand)

    @staticmethod
    def _folder_of(root: str, name: str) -> Path | None:
        """The folder of an adapter that no one has registered: its name is its path from --lora_dir."""
        if name.startswith("/") or ".." in name.split("/"):
            return None
        try:
            check_name(name)
            folder = folder_below(root, name)
        except AdapterError:
            return None
        return folder if has_adapter(folder) else None


def not_found(name: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"the model {name[:SHOWN]!r} does not exist; GET /v1/models shows the models of this server", "model"
    )
