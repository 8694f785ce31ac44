"""How the replies of several ranks become the result of a call."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.errors import WorkerCallError
from lightserve.ipc.worker_calls import (
    FETCH_KV,
    FLUSH_KV,
    LOAD_LORA,
    LOOKUP_KV,
    LORA_FAILED,
    PROFILE,
    RECEIVE_KV,
    WAIT_FOR_LOAD,
    WorkerCall,
)
from lightserve.messages.worker_calls import KvFetched, KvFlushed, KvLoaded, LoraLoaded, ProfileResult

FAILED = WorkerCallError("model worker 1: a call: OSError: the disk is gone")


@pytest.mark.parametrize(
    ("call", "replies", "result"),
    [
        (WAIT_FOR_LOAD, [KvLoaded(1.0), KvLoaded(3.0)], KvLoaded(3.0)),
        (WAIT_FOR_LOAD, [KvLoaded(1.0), KvLoaded(0.0, is_valid=False)], KvLoaded(1.0, is_valid=False)),
        (WAIT_FOR_LOAD, [KvLoaded(1.0), FAILED], KvLoaded(1.0, is_valid=False)),
        (LOOKUP_KV, [[0, 0, 1], [0, 1]], [0, 1]),
        (LOOKUP_KV, [[0, 0, 1], FAILED], []),
        (FETCH_KV, [KvFetched([True, True], 2.0), KvFetched([True, False], 1.0)], KvFetched([True, False], 2.0)),
        (FETCH_KV, [KvFetched([True, True], 2.0), FAILED], KvFetched([])),
        (FETCH_KV, [KvFetched([True, True]), KvFetched([True])], KvFetched([])),
        (FLUSH_KV, [KvFlushed([4, 5], [0, 1], [10, 20]), KvFlushed([3, 6], [1, 0], [11, 21])],
         KvFlushed([3, 5], [1, 1], [21, 41])),
        (FLUSH_KV, [FAILED, KvFlushed([3], [0], [11])], KvFlushed([], [], [])),
        (FLUSH_KV, [KvFlushed([4, 5], [0, 0], [1, 1]), KvFlushed([3], [0], [11])], KvFlushed([], [], [])),
        (LOAD_LORA, [LoraLoaded(), LoraLoaded()], LoraLoaded()),
        (LOAD_LORA, [LoraLoaded(), LoraLoaded("b"), LoraLoaded("c")], LoraLoaded("b")),
        (LOAD_LORA, [LoraLoaded(), FAILED], LoraLoaded(LORA_FAILED)),
        (PROFILE, [ProfileResult(["a"]), ProfileResult(["b"], "late")], ProfileResult(["a", "b"], "late")),
        (PROFILE, [ProfileResult(["a"]), FAILED, FAILED], ProfileResult(["a"], str(FAILED))),
    ],
)  # fmt: skip
def test_the_replies_of_all_ranks_join(call: WorkerCall[Any, Any], replies: list[Any], result: Any) -> None:
    assert call.joined(replies) == result


def test_an_error_is_raised_if_a_call_has_no_result_for_it() -> None:
    with pytest.raises(WorkerCallError, match="the disk is gone"):
        RECEIVE_KV.joined([FAILED])


def test_a_failure_that_becomes_a_result_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    LOOKUP_KV.joined([[0], FAILED])
    FETCH_KV.joined([KvFetched([True, True]), KvFetched([True])])

    assert [record.message for record in caplog.records] == [
        str(FAILED),
        "fetch_kv: the ranks disagree: their lists have [2, 1] items",
    ]
