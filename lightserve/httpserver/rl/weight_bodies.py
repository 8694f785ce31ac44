"""What trainers send about weights: the bodies of SGLang's endpoints and of vLLM's."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal

from pydantic import Field

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.http.body import Body
from lightserve.messages.rl import JoinWeightGroup
from lightserve.messages.weights import WeightBuffering, WeightTensor

MAX_TENSORS = 200_000
MAX_NAME = 512  # characters
MAX_RANKS = 65_536
JOIN_TIMEOUT_S = 120.0
PACKED_BYTES = 2**30  # vLLM's default
SGLANG_GROUP, VLLM_GROUP = "weight_update_group", "weight_transfer"

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Backend = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]  # of torch.distributed; workers know that of their device
Port = Annotated[int, Field(strict=False, ge=1, le=65_535)]  # AReaL sends it as text
Version = Annotated[str, Field(max_length=256)]
Timeout = Annotated[float, Field(gt=0, le=3600)]
Sizes = list[Annotated[int, Field(ge=0, le=2**40)]]
Selector = Literal["target", "draft", "all"]


class TensorList(Body):
    """Tensors as a checkpoint has them, in the order in which they are sent."""

    names: list[Name] = Field(default=[], max_length=MAX_TENSORS)
    shapes: list[Sizes] = Field(default=[], max_length=MAX_TENSORS)

    def tensors(self, dtypes: list[str], dtypes_field: str) -> list[WeightTensor]:
        if not len(self.names) == len(dtypes) == len(self.shapes):
            raise InvalidRequestError(
                f"names has {len(self.names)} entries, {dtypes_field} {len(dtypes)} and shapes {len(self.shapes)}; "
                "each tensor needs one in each",
                "names",
            )
        triples = zip(self.names, dtypes, self.shapes, strict=True)
        return [WeightTensor(name, dtype.removeprefix("torch."), tuple(shape)) for name, dtype, shape in triples]


class InitGroup(Body):
    master_address: Name
    master_port: Port
    rank_offset: int = Field(ge=1, le=MAX_RANKS)
    world_size: int = Field(ge=2, le=MAX_RANKS)
    group_name: Name = SGLANG_GROUP
    backend: Backend = "nccl"
    timeout_s: Timeout = JOIN_TIMEOUT_S

    def query(self, query_id: int) -> JoinWeightGroup:
        return JoinWeightGroup(
            query_id,
            self.group_name,
            self.rank_offset,
            self.world_size,
            self.backend,
            self.timeout_s,
            self.master_address,
            self.master_port,
        )


class DestroyGroup(Body):
    group_name: Name = SGLANG_GROUP


class UpdateFromDistributed(TensorList):
    dtypes: list[str] = Field(default=[], max_length=MAX_TENSORS)
    group_name: Name = SGLANG_GROUP
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Version | None = None
    load_format: Literal["flattened_bucket"] | None = None
    selector: Selector | None = None

    @property
    def buffering(self) -> WeightBuffering | None:
        return None if self.load_format is None else WeightBuffering.BUCKET


class UpdateFromDisk(Body):
    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_format: Literal["auto", "safetensors"] | None = None
    weight_version: Version | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    selector: Selector = "all"  # an addition


class Session(Body):
    selector: Selector = "all"


class EndSession(Body):
    selector: Selector | None = None
    weight_version: Version | None = None
    flush_cache: bool = True


class NewVersion(Body):
    new_version: Version
    abort_all_requests: bool = True


class NamedWeight(Body):
    name: Name
    truncate_size: int = Field(default=100, ge=1, le=100_000)


class InitInfo(Body):
    """Of vLLM. ``backend`` is an addition: with gloo, a trainer without a GPU can be tried."""

    master_address: str = Field(default="", max_length=MAX_NAME)
    master_port: Port | None = None
    nccl_unique_id_b64: str | None = Field(default=None, max_length=1024)
    rank_offset: int = Field(ge=1, le=MAX_RANKS)
    world_size: int = Field(ge=2, le=MAX_RANKS)
    packed: bool = False
    packed_buffer_size_bytes: int = Field(default=PACKED_BYTES, ge=1, le=2**36)
    backend: Literal["nccl", "gloo"] = "nccl"
    timeout_s: Timeout = JOIN_TIMEOUT_S

    def query(self, query_id: int) -> JoinWeightGroup:
        if self.nccl_unique_id_b64 is None and (not self.master_address or self.master_port is None):
            raise InvalidRequestError("init_info needs nccl_unique_id_b64, or master_address and master_port")
        return JoinWeightGroup(
            query_id,
            VLLM_GROUP,
            self.rank_offset,
            self.world_size,
            self.backend,
            self.timeout_s,
            self.master_address,
            self.master_port or 0,
            WeightBuffering.PACKED if self.packed else WeightBuffering.EACH,
            self.packed_buffer_size_bytes,
            uses_torch=self.backend == "gloo",
            unique_id=b"" if self.nccl_unique_id_b64 is None else _unique_id(self.nccl_unique_id_b64),
        )


def _unique_id(text: str) -> bytes:
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError("nccl_unique_id_b64 is not base64") from error
    if len(content) != 128:
        raise InvalidRequestError(f"nccl_unique_id_b64 holds {len(content)} bytes; an NCCL unique id has 128")
    return content


class InitEngine(Body):
    init_info: InitInfo


class UpdateInfo(TensorList):
    dtype_names: list[str] = Field(default=[], max_length=MAX_TENSORS)


class UpdateWeights(Body):
    update_info: UpdateInfo = UpdateInfo()


class FinishUpdate(Body):
    weight_version: Version | None = None


class CollectiveRpc(Body):
    method: str
    args: list[Any] = Field(default=[], max_length=16)
    kwargs: dict[str, Any] = Field(default_factory=dict)
