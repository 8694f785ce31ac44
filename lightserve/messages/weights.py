"""New weights for a model that is served: httpserver -> router -> model worker, and their replies."""

from __future__ import annotations

import enum

import msgspec


class WeightTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a trainer announces, as its checkpoint has it."""

    name: str
    dtype: str  # torch's name: "bfloat16"
    shape: tuple[int, ...]


class WeightBuffering(enum.Enum):
    """How a trainer broadcasts tensors."""

    EACH = "each"  # one broadcast a tensor
    BUCKET = "flattened_bucket"  # the bytes of all of them in one broadcast
    PACKED = "packed"  # chunks of bytes; a chunk ends with the tensor that makes it larger than ``buffer_bytes``


class WeightSelector(enum.Enum):
    """Which weights an update has, as in SGLang."""

    ALL = "all"  # the model, and the layer for drafts of its checkpoint (MTP) if its tensors come
    TARGET = "target"  # the model alone
    DRAFT = "draft"  # what drafts alone: MTP, or a head or a model with files of its own


class JoinTorchGroup(msgspec.Struct, frozen=True, tag=True):
    """Join a trainer in a process group of torch."""

    name: str
    address: str
    port: int
    first_rank: int  # of worker 0
    world_size: int
    backend: str  # gloo, or that of the device: nccl
    timeout_s: float


class JoinNccl(msgspec.Struct, frozen=True, tag=True):
    """Join a trainer in a communicator of NCCL, without torch's process groups."""

    name: str
    first_rank: int  # of worker 0
    world_size: int
    timeout_s: float
    unique_id: bytes = b""  # 128 bytes; empty: a store at this address has it
    address: str = ""
    port: int = 0


class LeaveGroup(msgspec.Struct, frozen=True, tag=True):
    """Close a group of a trainer."""

    name: str


class CheckFolder(msgspec.Struct, frozen=True, tag=True):
    """Whether weights can be loaded from a folder. Nothing is changed."""

    path: str
    selector: WeightSelector = WeightSelector.ALL


class LoadFolder(msgspec.Struct, frozen=True, tag=True):
    """Load all weights from a folder that was checked."""

    path: str
    selector: WeightSelector = WeightSelector.ALL


class ReceiveTensors(msgspec.Struct, frozen=True, tag=True):
    """Receive tensors from the trainer, and write them into the weights. The first ones begin a load."""

    group: str
    tensors: list[WeightTensor]
    buffering: WeightBuffering = WeightBuffering.EACH
    buffer_bytes: int = 0
    restarts: bool = False  # drop a load that has begun
    discards: bool = False  # the model computes all of them itself
    selector: WeightSelector = WeightSelector.ALL


class CheckTensors(msgspec.Struct, frozen=True, tag=True):
    """Whether a group exists, and the model has a place for these tensors of it. Nothing is changed."""

    group: str
    tensors: list[WeightTensor]
    selector: WeightSelector = WeightSelector.ALL


class FinishLoad(msgspec.Struct, frozen=True, tag=True):
    """All tensors have come."""


class CancelLoad(msgspec.Struct, frozen=True, tag=True):
    """No more tensors of this load will come. The weights are of no use until the next one."""


class ReadTensor(msgspec.Struct, frozen=True, tag=True):
    """The first numbers of a weight, as it is stored, of worker 0."""

    name: str
    limit: int


WorkerWeightsCommand = (
    JoinTorchGroup
    | JoinNccl
    | LeaveGroup
    | CheckFolder
    | LoadFolder
    | CheckTensors
    | ReceiveTensors
    | FinishLoad
    | CancelLoad
    | ReadTensor
)


class WorkerWeightsReply(msgspec.Struct, frozen=True):
    error: str = ""  # why it failed
    is_client_error: bool = False  # what the trainer sent does not fit the model
    missing: int | None = None  # tensors that the load still needs; None: no load is open, or that is not known
    used: int = 0  # of the checked tensors, those that fill weights
    has_model: bool = False  # the load that has ended had weights of the model
    has_drafts: bool = False  # the load that has ended had weights of what drafts
    has_repeated: bool = False  # one of the checked tensors has come before in the open load
    values: list[float] = []
