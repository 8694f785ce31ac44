"""Merge an adapter into the weights of a checkpoint while they are loaded: the model then costs nothing more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from lightserve.common.basemodel.lora import read_matrices
from lightserve.common.basemodel.spec import ModelSpec
from lightserve.common.checkpoint.reader import CheckpointTensor
from lightserve.errors import AdapterError
from lightserve.model_files.lora.adapter import Adapter, LinearSize, check_base


def check_merge(adapter: Adapter, linears: dict[str, LinearSize], spec: ModelSpec) -> None:
    """Raise if the adapter cannot be merged into this model."""
    config, names = spec.config, spec.names
    vocab = {}
    if not spec.is_tied:  # a merge would change both the embedding and the head
        vocab[names.embedding] = LinearSize(config.hidden_size, config.vocab_size)
        vocab[names.lm_head] = LinearSize(config.vocab_size, config.hidden_size)
    check_base(adapter, {**linears, **vocab})
    for name, module in adapter.modules.items():
        if module.is_embedding != (name == names.embedding):
            raise AdapterError(f"{adapter.file}: {name} has tensors of the wrong kind for this module")
        scheme = None if config.quantization is None else config.quantization.scheme_of(name)
        if scheme is not None and scheme.is_stored:
            raise AdapterError(
                f"{adapter.file}: the checkpoint stores {name} quantised ({config.quantization}), so no adapter can be "
                "merged; load it at run time (--lora_modules), or use the unquantised checkpoint"
            )


def merged(checkpoint: Iterable[CheckpointTensor], adapter: Adapter, is_transposed: bool) -> Iterator[CheckpointTensor]:
    """The checkpoint with the products of the adapter added; ``is_transposed``: it stores linears as [in, out]."""
    left = {f"{name}.weight": (module, a, b) for name, module, a, b in read_matrices(adapter)}
    for name, tensor, file in checkpoint:
        matrices = left.pop(name, None)
        if matrices is not None:
            module, a, b = matrices
            delta = module.scale * (b.float() @ a.float())
            delta = delta.T if module.is_embedding or is_transposed else delta
            tensor = _checked(tensor, delta, adapter, name)
        yield CheckpointTensor(name, tensor, file)
    if left:
        raise AdapterError(f"{adapter.file}: the checkpoint has no tensor {next(iter(left))} to merge it into")


def _checked(tensor: Tensor, delta: Tensor, adapter: Adapter, name: str) -> Tensor:
    if tensor.shape != delta.shape:
        raise AdapterError(
            f"{adapter.file}: {name} has shape {tuple(tensor.shape)}, but the adapter's product {tuple(delta.shape)}"
        )
    return (tensor.float() + delta).to(tensor.dtype)
