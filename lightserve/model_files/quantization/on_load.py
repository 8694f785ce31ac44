"""``--quantization`` and ``--quantization_config``: float weights that are quantised while they are loaded.

The file of ``--quantization_config`` chooses by module. The first name that means a module decides:

    {"default": "w4", "modules": {"re:.*down_proj": "int8", "model.layers.0": "none", "lm_head": "fp8"}}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightserve.errors import ModelFilesError, OptionError
from lightserve.model_files.folder import read_json
from lightserve.model_files.quantization.module_names import (
    EMBEDDINGS,
    HEADS,
    REGEX,
    compile_pattern,
    is_listed,
    last_part,
)
from lightserve.model_files.quantization.quant_config import QuantConfig, Scheme

KINDS = ("fp8", "int8", "w4")
NONE = "none"
NOT_QUANTIZED = (*HEADS, *EMBEDDINGS)


@dataclass(frozen=True)
class OnLoadScheme(Scheme):
    kind: str  # one of KINDS

    is_stored = False


@dataclass(frozen=True)
class OnLoadConfig(QuantConfig):
    scheme: OnLoadScheme | None  # of modules without a choice of their own; None: they stay as they are
    modules: tuple[tuple[str, OnLoadScheme | None], ...] = ()  # by name, as in ``is_listed``

    def scheme_of(self, module: str) -> Scheme | None:
        """Embeddings and heads stay as they are, if not named: they are sensitive."""
        return self._named(module, default=None if last_part(module) in NOT_QUANTIZED else self.scheme)

    def scheme_of_router(self, module: str) -> Scheme | None:
        """Routers too, which are hardly any memory."""
        return self._named(module, default=None)

    def scheme_of_gate(self, module: str) -> Scheme | None:
        """As for routers."""
        return self._named(module, default=None)

    def _named(self, module: str, default: OnLoadScheme | None) -> OnLoadScheme | None:
        return next((scheme for name, scheme in self.modules if is_listed(module, [name])), default)

    def check_modules(self, modules: Iterable[str]) -> None:
        known = list(modules)
        for name, _ in self.modules:
            if not any(is_listed(module, [name]) for module in known):
                raise ModelFilesError(
                    f"--quantization_config: {name} is no module of this model, such as {known[0]}; correct it"
                )

    def __str__(self) -> str:
        kinds = dict.fromkeys(scheme.kind for scheme in (self.scheme, *dict(self.modules).values()) if scheme)
        return f"{', '.join(kinds) or 'nothing'}, quantised while loading"


def read_on_load_config(path: Path) -> OnLoadConfig:
    """The file of ``--quantization_config``."""
    if not path.is_file():
        raise OptionError(f"--quantization_config {path}: no such file; correct the path")
    try:
        return _read(path)
    except ModelFilesError as error:
        raise OptionError(f"--quantization_config {error}") from error


def _read(path: Path) -> OnLoadConfig:
    table = read_json(path, remedy="correct it")
    if unknown := sorted(table.keys() - {"default", "modules"}):
        raise ModelFilesError(f"{path}: unknown field {unknown[0][:100]}; the fields are default and modules")
    modules = table.get("modules") or {}
    if not isinstance(modules, dict):
        raise ModelFilesError(f"{path}: modules is no object of names and kinds; correct it")
    for name in modules:
        if name.startswith(REGEX):
            compile_pattern(name.removeprefix(REGEX))
    choices = tuple((name, _scheme(path, modules, name)) for name in modules)
    return OnLoadConfig(_scheme(path, table, "default"), choices)


def _scheme(path: Path, table: Mapping[str, Any], field: str) -> OnLoadScheme | None:
    kind = table.get(field, NONE)
    if kind not in (*KINDS, NONE):
        text = str(kind)[:100]
        raise ModelFilesError(f"{path}: {field[:100]} is {text}; it must be one of {', '.join((*KINDS, NONE))}")
    return None if kind == NONE else OnLoadScheme(kind)
