"""The tensors of a GGUF file, with their names in transformers."""

from __future__ import annotations

import re
from typing import NamedTuple

from lightserve.errors import CheckpointError
from lightserve.model_files.gguf.architectures import GgufArchitecture, JoinedTensor
from lightserve.model_files.gguf.fields import layer_count
from lightserve.model_files.gguf.header import GgufHeader, TensorEntry

_LAYER_TENSOR = re.compile(r"(?P<block>blk\.(?P<layer>\d+)\.)(?P<part>[\w.]+?)(\.(?P<kind>weight|bias))?")
_OTHER_TENSOR = re.compile(r"(?P<part>\w+)\.(?P<kind>weight|bias)")
_LAYER = re.compile(r"blk\.(\d+)\.")
_ROPE_TENSORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")  # the config has them


class GgufTensor(NamedTuple):
    entry: TensorEntry
    block: str  # the prefix of its layer in the file
    prefix: str  # of its layer in transformers
    layer: int
    base_name: str
    kind: str  # weight, bias, or empty: the name has none of them
    # in transformers. Several names share the rows of the tensor. Empty: it is a part of ``joined``.
    targets: tuple[str, ...]
    joined: JoinedTensor | None

    @property
    def key(self) -> str:
        return f"{self.base_name}.{self.kind}" if self.kind else self.base_name


def model_tensors(header: GgufHeader, architecture: GgufArchitecture) -> list[GgufTensor]:
    """The tensors of the model in file order."""
    layers = layer_count(header)
    entries = sorted(header.tensors.values(), key=lambda entry: (entry.path, entry.offset))
    return [_named(header, architecture, entry) for entry in entries if not _is_skipped(architecture, entry, layers)]


def _is_skipped(architecture: GgufArchitecture, entry: TensorEntry, layers: int) -> bool:
    """Layers behind the last one predict more tokens, which is not done."""
    layer = _LAYER.match(entry.name)
    if layer is not None and int(layer[1]) >= layers:
        return True
    base_name = entry.name.removeprefix(layer[0] if layer else "").partition(".")[0]
    return base_name in _ROPE_TENSORS or base_name in architecture.copies


def _named(header: GgufHeader, architecture: GgufArchitecture, entry: TensorEntry) -> GgufTensor:
    match = _LAYER_TENSOR.fullmatch(entry.name) or _OTHER_TENSOR.fullmatch(entry.name)
    if match is None:
        raise _unknown(header, architecture, entry.name)
    groups = match.groupdict()
    layer, base_name, kind = groups.get("layer"), match["part"], match["kind"] or ""
    prefix = "" if layer is None else f"{architecture.layers}.{layer}."
    joined = next((joining for joining in architecture.joined if f"{base_name}.{kind}" in joining.parts), None)
    names = () if joined else _targets(architecture, base_name, kind)
    if names is None:
        raise _unknown(header, architecture, entry.name)
    targets = tuple(f"{prefix}{name}" for name in names)
    return GgufTensor(entry, groups.get("block") or "", prefix, int(layer or 0), base_name, kind, targets, joined)


def _targets(architecture: GgufArchitecture, base_name: str, kind: str) -> tuple[str, ...] | None:
    suffix = f".{kind}" if kind else ""
    whole = architecture.tensors.get(f"{base_name}{suffix}")
    if suffix and isinstance(whole, str):
        return (whole,)
    stems = architecture.tensors.get(base_name)
    if stems is None:
        return None
    return tuple(f"{name}{suffix}" for name in ((stems,) if isinstance(stems, str) else stems))


def _unknown(header: GgufHeader, architecture: GgufArchitecture, name: str) -> CheckpointError:
    model_type = architecture.model_type
    return CheckpointError(f"{header.path}: tensor {name} belongs to no {model_type} model; convert it again")
