"""A request that the dispatcher has accepted and that has not ended: all that another engine needs to continue it."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import msgspec

from lightserve.cluster.load_estimate import Assignment
from lightserve.media.tokens import with_image_ids
from lightserve.messages.block_hash import Hashes, block_hashes
from lightserve.messages.cluster import DispatchedReq, KvTarget, KvTransferParams
from lightserve.messages.int_arrays import int32s
from lightserve.messages.request import GenerateReq


@dataclass(slots=True, eq=False)
class InflightRequest:
    request: GenerateReq  # with a seed
    hashes: list[int]  # of the blocks of its prompt
    hash_bytes: bytes
    deadline_s: float | None
    output_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0  # of its prompt, as the index said when it was sent
    assignment: Assignment = field(default_factory=lambda: Assignment(0, 0, 0.0))  # in its engine
    is_moved: bool = False
    runs_alone: bool = False  # until its next token: it was in flight when workers crashed
    crashes: int = 0  # of engines that had it, since its last token
    refused_by: set[int] = field(default_factory=set)  # engines whose queue was full
    leaving: set[int] = field(default_factory=set)  # engines that have not confirmed yet that it was moved
    kv_transfer_params: KvTransferParams | None = None  # its engine may want its prompt from a prefill engine
    target: KvTarget | None = None  # it is the prompt of another request: its KV goes there
    may_prefill_remotely: bool = True  # its prompt may be computed by a prefill engine

    @property
    def req_id(self) -> int:
        return self.request.req_id

    @property
    def adapter(self) -> str:
        """The name of its LoRA adapter; empty: the base model."""
        return self.request.scheduling.lora

    @property
    def known_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.output_ids)

    def add_token(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        self.runs_alone, self.crashes = False, 0

    def message(self) -> DispatchedReq:
        age_s = time.monotonic() - self.request.arrived_s
        return DispatchedReq(
            self.request,
            age_s,
            self.hash_bytes,
            self.output_ids.copy(),
            self.is_moved,
            self.runs_alone,
            self.kv_transfer_params,
            self.target,
        )


def open_request(message: GenerateReq, uses_cache: bool, timeout_s: float | None) -> InflightRequest:
    salt = message.prefix_salt(uses_cache and message.scheduling.use_cache)
    if message.scheduling.lora:  # KV of an adapter differs from that of the base model
        salt = f"lora {message.scheduling.lora} {salt}"
    hashes: Hashes = block_hashes(with_image_ids(int32s(message.prompt_ids), message.images), salt)
    timeout_s = message.scheduling.timeout_s or timeout_s
    deadline_s = None if timeout_s is None else message.arrived_s + timeout_s
    if timeout_s != message.scheduling.timeout_s:  # --request_timeout of a gateway counts in its engines too
        message = msgspec.structs.replace(
            message, scheduling=msgspec.structs.replace(message.scheduling, timeout_s=timeout_s)
        )
    opened = InflightRequest(with_seed(message), hashes.tolist(), hashes.tobytes(), deadline_s)
    opened.may_prefill_remotely = (
        uses_cache and message.scheduling.use_cache and message.params.sampling.prompt_logprobs is None
    )
    return opened


def with_seed(message: GenerateReq) -> GenerateReq:
    """A request without a seed gets one now: every engine must sample the same tokens."""
    if message.params.sampling.seed is not None:
        return message
    return msgspec.structs.replace(message, params=message.params.replace(seed=random.getrandbits(63)))
