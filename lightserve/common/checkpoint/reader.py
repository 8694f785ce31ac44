"""A model's tensors as one stream, file by file, each with its name in transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch

from lightserve.common.checkpoint.gguf import gguf_bytes, gguf_metadata, gguf_tensors
from lightserve.errors import CheckpointError
from lightserve.model_files.safetensors_header import read_header, tensor_bytes
from lightserve.model_files.source import GgufSource, ModelSource

# By their names in safetensors. No model can be loaded from other dtypes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
CPU, META = torch.device("cpu"), torch.device("meta")


class CheckpointTensor(NamedTuple):
    name: str
    tensor: torch.Tensor  # may be a view of the file: copy it to keep it
    file: str


def open_checkpoint(source: ModelSource) -> Iterator[CheckpointTensor]:
    """Stream every tensor with one file open at a time.

    Tensors of safetensors and ``.bin`` files are views of the mapped file, so a slice reads only its own pages. GGUF
    tensors are decoded to float32 one by one, unless they stay packed: then they are views of uint8.
    """
    first_file: dict[str, str] = {}
    for file in _files_of(source):
        for name, tensor in _tensors_of(source, file):
            if name in first_file:
                raise CheckpointError(f"{file}: tensor {name} is also in {first_file[name]}; remove one of the files")
            first_file[name] = str(file)
            yield CheckpointTensor(name, tensor, str(file))


def tensor_metadata(source: ModelSource) -> Iterator[CheckpointTensor]:
    """The same tensors on the meta device: enough to check names, shapes and dtypes. It takes milliseconds."""
    for file in _files_of(source):
        if isinstance(source, GgufSource):
            tensors = gguf_metadata(source.header, source.hf_config(), source.is_packed)
        elif file.suffix == ".safetensors":
            tensors = _safetensors_metadata(file)
        else:
            tensors = _torch_file(file, META)
        for name, tensor in tensors:
            yield CheckpointTensor(name, tensor, str(file))


def module_tensors(folder: Path, names: Iterable[str]) -> Iterator[CheckpointTensor]:
    """The tensors of sentence-transformers' dense modules, as ``2_Dense.linear.weight``."""
    for name in names:
        files = [folder / name / file_name for file_name in ("model.safetensors", "pytorch_model.bin")]
        file = next((candidate for candidate in files if candidate.is_file()), None)
        if file is None:
            raise CheckpointError(f"{folder / name}: has no model.safetensors; fetch the folder again")
        tensors = _safetensors(file) if file.suffix == ".safetensors" else _torch_file(file)
        for tensor_name, tensor in tensors:
            yield CheckpointTensor(f"{name}.{tensor_name}", tensor, str(file))


def total_bytes(source: ModelSource) -> int:
    """The bytes of all tensors that `open_checkpoint` yields; for ``.bin`` files the file size, which is close."""
    if isinstance(source, GgufSource):
        return gguf_bytes(source.header, source.is_packed)
    files = source.weight_files()
    return sum(tensor_bytes(file) if file.suffix == ".safetensors" else file.stat().st_size for file in files)


def _files_of(source: ModelSource) -> list[Path]:
    """Those that ``_tensors_of`` reads. The first file of a GGUF model stands for all."""
    return [source.path] if isinstance(source, GgufSource) else source.weight_files()


def _tensors_of(source: ModelSource, file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(source, GgufSource):
        return gguf_tensors(source.header, source.hf_config(), source.is_packed)
    if file.suffix == ".safetensors":
        return _safetensors(file)
    return _torch_file(file)


def _safetensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safetensors.safe_open(file, framework="pt") as tensors:
            for name in tensors.offset_keys():  # in file order, so that the disk reads sequentially
                yield name, tensors.get_tensor(name)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{file}: not readable as safetensors ({error}); fetch it again") from error


def _safetensors_metadata(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (dtype, shape, _) in read_header(file).items():
        if dtype not in DTYPES:
            remedy = "only float checkpoints are supported; fetch the unquantised model"
            raise CheckpointError(f"{file}: {name} is {dtype[:100]}; {remedy}")
        yield name, torch.empty(shape, dtype=DTYPES[dtype], device=META)


def _torch_file(file: Path, device: torch.device = CPU) -> Iterator[tuple[str, torch.Tensor]]:
    """Loads with ``weights_only``: otherwise a ``.bin`` file could run any code."""
    try:
        content = torch.load(file, map_location=device, weights_only=True, mmap=True)
    except Exception as error:  # torch raises several types here, all with the same meaning
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{file}: not loadable with weights_only ({reason}); convert the model to safetensors"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, wanted a dict of tensors; convert it")
    while content:
        name = next(iter(content))
        tensor = content.pop(name)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{file}: {name} is a {type(tensor).__name__}, wanted a tensor; convert it")
        yield str(name), tensor
