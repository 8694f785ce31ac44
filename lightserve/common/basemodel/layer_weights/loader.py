"""One pass over a checkpoint into the weights that declared its tensors. Every error names the tensor and its file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch

from lightserve.common.basemodel.layer_weights.layer_weight import LayerWeight
from lightserve.common.basemodel.layer_weights.unused import number_of_layer, whole_unused_layers
from lightserve.common.checkpoint.piece import DUMMY_STD, FLOATS, Piece
from lightserve.common.checkpoint.reader import CheckpointTensor
from lightserve.common.checkpoint.upload import Upload
from lightserve.errors import CheckpointError
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

SHOWN = 8  # names in a message; a wrong config misses hundreds


def load_weights(
    layers: Sequence[LayerWeight],
    checkpoint: Iterable[CheckpointTensor],
    num_layers: int,
    used_elsewhere: Collection[str] = (),
    report_missing: Callable[[int], None] = lambda count: None,
) -> None:
    """Fill the layers' weights. Tensors that no layer declared are logged, unless they are layers of the model.

    ``used_elsewhere``: names of tensors that other pipeline stages load. ``report_missing`` is called with how many
    tensors have not come, those of other stages too, before each next one is taken.
    """
    wanted = _pieces_by_name(layers)
    used = {*wanted, *used_elsewhere}
    others = used - set(wanted)
    unused: dict[str, str] = {}
    report_missing(len(wanted) + len(others))
    with Upload() as upload:
        for name, tensor, file in checkpoint:
            if name in wanted:
                for layer, piece in wanted.pop(name):
                    layer.fill(piece, tensor, file, upload)
            elif name in others:
                others.discard(name)
            elif name in used:
                raise CheckpointError(f"{file}: the tensor {name} occurs a second time")
            else:
                unused[name] = file
            report_missing(len(wanted) + len(others))
    _check_none_is_missing(wanted)
    _check_no_layer_is_unused(unused, used, num_layers)
    if unused:
        logger.warning("the checkpoint has tensors that are not used: %s", _listed(_with_files(unused)))


def check_weights(
    layers: Iterable[LayerWeight], tensor_metadata: Iterable[CheckpointTensor], num_layers: int
) -> list[str]:
    """Find the errors that `load_weights` would find, before any tensor is read or allocated.

    Returns the tensors that no layer uses.
    """
    wanted = _pieces_by_name(layers)
    used = set(wanted)
    unused: dict[str, str] = {}
    for name, tensor, file in tensor_metadata:
        if name in wanted:
            for _, piece in wanted.pop(name):
                _check(piece, tensor, file)
        elif name not in used:
            unused[name] = file
    _check_none_is_missing(wanted)
    _check_no_layer_is_unused(unused, used, num_layers)
    return list(unused)


def check_part(layers: Iterable[LayerWeight], tensor_metadata: Iterable[CheckpointTensor]) -> set[str]:
    """Check some tensors of a checkpoint against the weights. A tensor that no layer uses is an error.

    Returns the names of those that are used.
    """
    wanted = _pieces_by_name(layers)
    used: set[str] = set()
    unknown: list[str] = []
    for name, tensor, file in tensor_metadata:
        if name in used:
            raise CheckpointError(f"{file}: the tensor {name} occurs a second time")
        if name not in wanted:
            unknown.append(name)
            continue
        used.add(name)
        for _, piece in wanted[name]:
            _check(piece, tensor, file)
    if unknown:
        raise CheckpointError(f"there is no place for {_listed(unknown)}; send the names that the checkpoint has")
    return used


def fill_dummy(layers: Iterable[LayerWeight], seed: int = 0) -> None:
    """Random weights of the right shapes, the same at every start."""
    for layer in layers:
        layer.restore_weights_before_loading()
        for piece in layer.pieces():
            if piece.into is not None:
                _randomize(piece.into, torch.Generator(piece.into.device).manual_seed(seed))
                if piece.into.ndim == 1 and piece.name.endswith(".weight"):
                    piece.into.add_(1)  # norms
            elif piece.consumer is not None:
                piece.consumer.fill_dummy(torch.Generator(piece.consumer.device).manual_seed(seed))
            seed += 1
        layer.process_weights_after_loading()


def _randomize(tensor: torch.Tensor, generator: torch.Generator) -> None:
    if tensor.dtype in FLOATS:
        tensor.normal_(std=DUMMY_STD, generator=generator)
    elif tensor.is_floating_point():  # torch has no random 8-bit floats
        tensor.copy_(torch.randn(tensor.shape, generator=generator, device=tensor.device))
    else:
        tensor.random_(generator=generator)


class _LoadingLayer:
    """A layer whose pieces are filled one by one, in any order."""

    def __init__(self, weight: LayerWeight, num_pieces: int) -> None:
        self._weight = weight
        self._num_pieces = self._num_left = num_pieces

    def fill(self, piece: Piece, tensor: torch.Tensor, file: str, upload: Upload) -> None:
        """Copy or convert the tensor. After the last one the weights of the layer are completed.

        A layer is not completed later than that, because some weights need memory from their first piece to their last.
        """
        if self._num_left == self._num_pieces:
            self._weight.restore_weights_before_loading()
        _fill(piece, tensor, file, upload)
        self._num_left -= 1
        if not self._num_left:
            upload.after_copies(self._weight.process_weights_after_loading)


def _pieces_by_name(layers: Iterable[LayerWeight]) -> dict[str, list[tuple[_LoadingLayer, Piece]]]:
    """Several weights may be parts of one tensor: a checkpoint may store q, k and v together."""
    by_name: dict[str, list[tuple[_LoadingLayer, Piece]]] = defaultdict(list)
    for layer in layers:
        pieces = list(layer.pieces())
        loading = _LoadingLayer(layer, len(pieces))
        for piece in pieces:
            by_name[piece.name].append((loading, piece))
    return by_name


def _fill(piece: Piece, tensor: torch.Tensor, file: str, upload: Upload) -> None:
    _check(piece, tensor, file)
    if piece.into is not None:
        upload.copy(piece.into, piece.shard_of(tensor))
    elif piece.consumer is not None:
        upload.convert(piece.consumer.device, piece.shard_of(tensor), partial(piece.consumer.receive, piece.name))


def _check(piece: Piece, tensor: torch.Tensor, file: str) -> None:
    if not piece.has_shape(tuple(tensor.shape)):
        raise CheckpointError(
            f"{file}: {piece.name} has shape {tuple(tensor.shape)}, but config.json needs {piece.shape}; "
            "fetch the checkpoint and the config.json of the same model"
        )
    if tensor.dtype not in piece.dtypes:
        raise CheckpointError(f"{file}: {piece.name} is {_name(tensor.dtype)}; {_wanted(piece)}")


def _wanted(piece: Piece) -> str:
    if piece.dtypes == FLOATS:
        return "only float checkpoints are supported; fetch the unquantised model"
    return f"this model needs {' or '.join(map(_name, piece.dtypes))}; fetch the config.json of this checkpoint"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_none_is_missing(wanted: Iterable[str]) -> None:
    missing = sorted(wanted)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_listed(missing)}; fetch its files and its config.json again")


def _check_no_layer_is_unused(unused: Mapping[str, str], used: Iterable[str], num_layers: int) -> None:
    """Refuse a checkpoint with more layers than config.json: the model would run, and its text would be wrong."""
    names = whole_unused_layers(unused, used, num_layers)
    if names:
        last = max(map(number_of_layer, names))
        raise CheckpointError(
            f"the checkpoint has layers 0 to {last}, but config.json says {num_layers}: "
            f"{names[0]} ({unused[names[0]]}) would not be used; fetch the config.json of this checkpoint"
        )


def _with_files(unused: Mapping[str, str]) -> list[str]:
    return [f"{name} ({file})" for name, file in unused.items()]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} tensors: {', '.join(names[:SHOWN])}{more}"
