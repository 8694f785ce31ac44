"""The tensors of an adapter: names and shapes, checked against its config and the linears of the base model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightserve.errors import AdapterError, ModelFilesError
from lightserve.model_files.config.text_part import is_of_other_part
from lightserve.model_files.lora.config import LoraConfig, read_config
from lightserve.model_files.safetensors_header import TensorInfo, read_header

WEIGHTS_FILE = "adapter_model.safetensors"
DTYPES = ("F32", "F16", "BF16")
SHOWN = 4  # names in a message
PREFIX = "base_model.model."
_LORA_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_EMBEDDING_TENSOR = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<side>[AB])(?:\.default)?")


class LinearSize(NamedTuple):
    """A linear of the base model."""

    out_size: int
    in_size: int


class LoraModule(NamedTuple):
    """The adapter of one linear."""

    rank: int
    scale: float  # of B @ A
    a: str  # its tensors in the file, [rank, in] and [out, rank]
    b: str
    size: LinearSize
    is_embedding: bool = False  # the rows of the embedding are inputs


@dataclass(frozen=True, slots=True)
class Adapter:
    config: LoraConfig
    file: Path
    modules: dict[str, LoraModule]  # by the name of the linear in the base model

    @property
    def folder(self) -> Path:
        return self.file.parent


def read_adapter(folder: Path) -> Adapter:
    """What the files of a folder say. Raises AdapterError that names the file, the problem and the remedy."""
    config = read_config(folder)
    file = folder / WEIGHTS_FILE
    if not file.exists() and (folder / "adapter_model.bin").exists():
        raise AdapterError(f"{folder}: adapter_model.bin is not supported; save the adapter as safetensors with PEFT")
    try:
        tensors = read_header(file)
    except ModelFilesError as error:
        raise AdapterError(str(error)) from error
    return Adapter(config, file, _modules(config, file, tensors))


def check_rank(adapter: Adapter, max_rank: int) -> None:
    name, module = max(adapter.modules.items(), key=lambda item: item[1].rank)
    if module.rank > max_rank:
        raise AdapterError(
            f"{adapter.config.path}: {name} has rank {module.rank}; the limit is {max_rank} (--max_lora_rank)"
        )


def check_base(adapter: Adapter, linears: Mapping[str, LinearSize], others: Iterable[str] = ()) -> None:
    """Check that the base model has the adapter's modules. ``others`` are modules that take no adapter."""
    for name, module in adapter.modules.items():
        size = linears.get(name)
        if size is None:
            reason = _reason(adapter, name, set(others))
            raise AdapterError(f"{adapter.file}: {reason}; the model has {_listed(sorted(linears))}")
        if size != module.size:
            raise AdapterError(
                f"{adapter.file}: {name} is for a linear of {module.size.in_size} inputs and {module.size.out_size} "
                f"outputs; the model's has {size.in_size} and {size.out_size}; use the model that it was trained on"
            )
    _check_complete(adapter, linears)


def _reason(adapter: Adapter, name: str, others: set[str]) -> str:
    """Why a linear takes no adapter."""
    if is_of_other_part(name):
        count = sum(map(is_of_other_part, adapter.modules))
        return (
            f"{name} and {count - 1} more modules are of the vision tower, which is not served; train the adapter "
            "without them (exclude_modules of PEFT)"
        )
    return (
        f"{name} takes no adapter at run time; use --merge_lora" if name in others else f"{name} is not in this model"
    )


def _check_complete(adapter: Adapter, linears: Iterable[str]) -> None:
    """PEFT saves every module that it targets, so a file that lacks some is damaged."""
    config = adapter.config
    for target in config.targets:
        wanted = [name for name in linears if name == target or name.endswith(f".{target}")]
        missing = [name for name in wanted if name not in adapter.modules]
        is_whole = len(missing) == len(wanted) or config.covers_all_layers
        if missing and is_whole:
            raise AdapterError(f"{adapter.file}: {config.path.name} targets {target}, but lacks {_listed(missing)}")


def _modules(config: LoraConfig, file: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, LoraModule]:
    sides: dict[tuple[str, bool], dict[str, str]] = {}
    for name, tensor in tensors.items():
        module, side, is_embedding = _parsed(file, name)
        if tensor.dtype not in DTYPES:
            raise AdapterError(f"{file}: {name} is {tensor.dtype[:20]}; supported: {', '.join(DTYPES)}")
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise AdapterError(f"{file}: {name} has shape {tensor.shape}; must be a matrix")
        names = sides.setdefault((module, is_embedding), {})
        if side in names:
            raise AdapterError(
                f"{file}: {name} and {names[side]} are the same tensor; save the adapter again with PEFT"
            )
        names[side] = name
    if not sides:
        raise AdapterError(f"{file}: has no tensors; save the adapter again with PEFT")
    return {module: _module(config, file, module, names, tensors) for (module, _), names in sides.items()}


def _parsed(file: Path, name: str) -> tuple[str, str, bool]:
    for pattern, is_embedding in ((_LORA_TENSOR, False), (_EMBEDDING_TENSOR, True)):
        match = pattern.fullmatch(name)
        if match is not None:
            return match["module"].removeprefix(PREFIX), match["side"], is_embedding
    if "lora_magnitude_vector" in name:
        raise AdapterError(f"{file}: {name[:100]}: DoRA adapters are not supported; merge it into the model with PEFT")
    raise AdapterError(
        f"{file}: the tensor {name[:100]} is not part of a LoRA adapter; merge it into the model with PEFT"
    )


def _module(
    config: LoraConfig, file: Path, module: str, sides: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> LoraModule:
    if len(sides) != 2:
        raise AdapterError(f"{file}: {module} has only lora_{next(iter(sides))}; save the adapter again with PEFT")
    (rank, in_size), (out_size, b_rank) = tensors[sides["A"]].shape, tensors[sides["B"]].shape
    if rank != b_rank:
        raise AdapterError(f"{file}: {module} has lora_A of rank {rank}, but lora_B of rank {b_rank}")
    if rank != config.rank_of(module):
        raise AdapterError(
            f"{file}: {module} has rank {rank}, but {config.path.name} says {config.rank_of(module)} (r, rank_pattern)"
        )
    is_embedding = "lora_embedding_" in sides["A"]
    return LoraModule(
        rank, config.scale_of(module), sides["A"], sides["B"], LinearSize(out_size, in_size), is_embedding
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
