"""One pass over a checkpoint into the weights that declared its tensors, with every mistake named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from lightserve.common.basemodel.layer_weights.layer_weight import LayerWeight
from lightserve.common.checkpoint.piece import FLOATS, Piece
from lightserve.common.checkpoint.reader import CheckpointTensor
from lightserve.common.checkpoint.upload import Upload
from lightserve.errors import CheckpointError
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

SHOWN = 8  # names in a message; a wrong config misses hundreds
DUMMY_STD = 0.02  # as models are initialised: activations stay finite through any number of layers


def load_weights(layers: Sequence[LayerWeight], checkpoint: Iterable[CheckpointTensor]) -> None:
    """Fill the layers' weights. Tensors that no layer declared are reported and left."""
    wanted = {piece.name: piece for layer in layers for piece in layer.pieces()}
    known = set(wanted)
    extra: list[str] = []
    with Upload() as upload:
        for name, tensor, file in checkpoint:
            if name in wanted:
                _fill(wanted.pop(name), tensor, file, upload)
            elif name in known:
                raise CheckpointError(f"{file}: the tensor {name} occurs a second time")
            else:
                extra.append(f"{name} ({file})")
    _check_none_is_missing(wanted)
    for layer in layers:
        layer.process_weights_after_loading()
    if extra:
        logger.warning("ignored: the model has no use for %s", _listed(extra))


def check_weights(layers: Iterable[LayerWeight], outline: Iterable[CheckpointTensor]) -> None:
    """The mistakes that `load_weights` would find, before anything is read or allocated."""
    wanted = {piece.name: piece for layer in layers for piece in layer.pieces()}
    for name, tensor, file in outline:
        if name in wanted:
            _check(wanted.pop(name), tensor, file)
    _check_none_is_missing(wanted)


def fill_dummy(layers: Iterable[LayerWeight], seed: int = 0) -> None:
    """Random weights of the right shapes, the same at every start."""
    for layer in layers:
        for piece in layer.pieces():
            if piece.into is not None:
                _randomize(piece.into, torch.Generator(piece.into.device).manual_seed(seed))
                if piece.into.ndim == 1 and piece.name.endswith(".weight"):
                    piece.into.add_(1)  # norms
            seed += 1
        layer.process_weights_after_loading()


def _randomize(tensor: torch.Tensor, generator: torch.Generator) -> None:
    if tensor.dtype in FLOATS:
        tensor.normal_(std=DUMMY_STD, generator=generator)
    elif tensor.is_floating_point():  # torch draws no 8-bit floats
        tensor.copy_(torch.randn(tensor.shape, generator=generator, device=tensor.device))
    else:
        tensor.random_(generator=generator)


def _fill(piece: Piece, tensor: torch.Tensor, file: str, upload: Upload) -> None:
    _check(piece, tensor, file)
    if piece.into is not None:
        upload.copy(piece.into, piece.part(tensor))


def _check(piece: Piece, tensor: torch.Tensor, file: str) -> None:
    if tuple(tensor.shape) != piece.shape:
        raise CheckpointError(
            f"{file}: {piece.name} has shape {tuple(tensor.shape)}, config.json wants {piece.shape}; "
            "fetch the two that belong together"
        )
    if tensor.dtype not in piece.dtypes:
        raise CheckpointError(f"{file}: {piece.name} is {_name(tensor.dtype)}; {_wanted(piece)}")


def _wanted(piece: Piece) -> str:
    if piece.dtypes == FLOATS:
        return "only float checkpoints load here; fetch the unquantised model"
    return f"this model needs {' or '.join(map(_name, piece.dtypes))}; fetch the config.json of this checkpoint"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_none_is_missing(wanted: Mapping[str, Piece]) -> None:
    if wanted:
        raise CheckpointError(
            f"the checkpoint lacks {_listed(sorted(wanted))}; fetch its files again, with the config.json of that model"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} tensors: {', '.join(names[:SHOWN])}{more}"
