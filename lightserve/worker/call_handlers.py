"""What a model worker does for each call of worker_calls.py. A call that it has no handler for cannot be made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightserve.ipc.worker_calls import (
    CANCEL_RECEIVE,
    COMPILE_GRAMMAR,
    FETCH_KV,
    FLUSH_KV,
    KV_ADDRESS,
    LOAD_LORA,
    LOOKUP_KV,
    PROFILE,
    READ_PROFILE,
    RECEIVE_KV,
    SET_MEMORY,
    UPDATE_WEIGHTS,
    WAIT_FOR_LOAD,
)
from lightserve.worker.rpc import CallHandler, handler

if TYPE_CHECKING:  # torch
    from lightserve.worker.profiler import WorkerProfiler
    from lightserve.worker.worker import ModelWorker


def call_handlers(worker: ModelWorker, profiler: WorkerProfiler | None) -> list[CallHandler]:
    handlers: list[CallHandler] = []
    if worker.pooling is None:
        handlers.append(handler(COMPILE_GRAMMAR, worker.compile_grammar))
    if worker.loras is not None:
        handlers.append(handler(LOAD_LORA, worker.loras.load))
    if worker.cpu_offload is not None:
        handlers.append(handler(WAIT_FOR_LOAD, worker.cpu_offload.wait))
    if (tiers := worker.storage_tiers) is not None:
        handlers += [handler(LOOKUP_KV, tiers.lookup), handler(FETCH_KV, tiers.fetch), handler(FLUSH_KV, tiers.flush)]
    if (receiver := worker.kv_transfer.receiver) is not None:
        handlers.append(handler(KV_ADDRESS, lambda _: [worker.kv_transfer.address]))
        handlers.append(handler(RECEIVE_KV, lambda _: receiver.next_received()))
        handlers.append(handler(CANCEL_RECEIVE, receiver.cancel))
    if worker.weights is not None:
        handlers.append(handler(UPDATE_WEIGHTS, worker.weights.handle))
    if worker.memory is not None:
        handlers.append(handler(SET_MEMORY, worker.memory.handle))
    if profiler is not None:
        handlers += [handler(PROFILE, profiler.run), handler(READ_PROFILE, lambda _: [profiler.read()])]
    return handlers
