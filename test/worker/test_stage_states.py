"""The first stage of a pipeline: its recurrent states see the accepted drafts of a step when the router knows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightserve.common.parallel import Parallel, RankGroup
from lightserve.config import WorkerConfig
from lightserve.messages.int_arrays import NO_INT32, int32s, int64s
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow
from lightserve.model_files.source import resolve
from lightserve.worker.worker import ModelWorker
from test.hybrid_model import save_hybrid_model
from test.worker.test_ngram import CONFIG

PROMPT = [9, 4, 7, 4, 7, 30, 2]
DRAFTS = [11, 12, 13]
PLACES = 50  # slots of a request
CACHED, SPARE = 30, 31  # rows of states


class Decode(NamedTuple):
    req_id: int
    token_ids: Sequence[int]  # its next token, and drafts
    ready_len: int  # tokens that are computed before
    new_slots: int  # places from the first on that have no slots yet


class FirstStage:
    """It has the first half of the layers, and what it sends to the second one is kept."""

    def __init__(self, folder: str) -> None:
        options: dict[str, Any] = {
            "device": "cpu",
            "max_total_token_num": 400,
            "max_state_rows": 40,
            "data_type": "float32",
        }
        config = WorkerConfig(model_dir=folder, pp=2, speculative_config=CONFIG, **options)
        self.worker = ModelWorker(config, resolve(folder), Parallel(pp=RankGroup(0, 2)))
        self.worker.model.hidden_state_link.send = self._keep  # type: ignore[method-assign]
        self._sent = torch.empty(0)

    def _keep(self, *tensors: Tensor) -> None:
        (self._sent,) = tensors

    def run(self, step: Step) -> Tensor:
        """What follows for each token: ``[tokens, 2 * hidden]``."""
        self.worker.launch(step)()
        return self._sent.transpose(0, 1).flatten(1)

    def compute(self, req_id: int, token_ids: Sequence[int], row: int, free: Sequence[int] = ()) -> Tensor:
        """A new request, whose state goes to this row."""
        first = req_id * PLACES
        new = NewReq(req_id, int32s(token_ids), SamplingParams(), seed=0, group_slots=(NO_INT32,))
        chunk = StepRow(req_id, int32s(range(first, first + len(token_ids))))
        rows = (int32s([row]),)
        return self.run(Step([chunk], [new], free=list(free), group_slots=rows, token_ids=int32s(token_ids)))

    def decode(self, decodes: Sequence[Decode], rows: Sequence[int]) -> Tensor:
        slots = [
            decode.req_id * PLACES + decode.ready_len + len(decode.token_ids) - number
            for decode in decodes
            for number in range(decode.new_slots, 0, -1)
        ]
        step = Step(
            [],
            decode_ids=int64s([decode.req_id for decode in decodes]),
            decode_slots=int32s(slots),
            slot_counts=int32s([decode.new_slots for decode in decodes]),
            draft_counts=int32s([len(decode.token_ids) - 1 for decode in decodes]),
            group_slots=(int32s(rows),),
            token_ids=int32s([token_id for decode in decodes for token_id in decode.token_ids]),
            ready_lens=int32s([decode.ready_len for decode in decodes]),
        )
        return self.run(step)

    def all_at_once(self, token_ids: Sequence[int]) -> Tensor:
        """What follows the last of these tokens, computed by a request of its own."""
        last = self.compute(6, token_ids, SPARE)[-1:]
        self.worker.launch(Step([], free=[6]))
        return last

    def overwrite(self, row: int) -> None:
        for buffers in self.worker.model.mem_manager.state_buffers:
            for buffer in buffers:
                buffer[:, row] = float("nan")

    @property
    def num_unverified(self) -> int:
        states = self.worker._drafts._stage_states
        return -1 if states is None else len(states._steps)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> FirstStage:
    return FirstStage(save_hybrid_model(tmp_path_factory.mktemp("hybrid"))[0])


@pytest.fixture(autouse=True)
def without_requests(stage: FirstStage) -> None:
    stage.worker.reset()


def drafting(req_id: int, token_id: int) -> Decode:
    return Decode(req_id, [token_id, *DRAFTS], len(PROMPT), 1 + len(DRAFTS))


def after(req_id: int, accepted: int, token_id: int) -> Decode:
    """The step after ``drafting``. Its token has the slot of a rejected draft, if there is one."""
    return Decode(req_id, [token_id], len(PROMPT) + 1 + accepted, int(accepted == len(DRAFTS)))


def text(first: int, accepted: int, last: int) -> list[int]:
    return [*PROMPT, first, *DRAFTS[:accepted], last]


@pytest.mark.parametrize("accepted", range(len(DRAFTS) + 1))
def test_a_state_sees_the_accepted_drafts_though_the_row_it_was_read_from_is_gone(
    stage: FirstStage, accepted: int
) -> None:
    stage.compute(1, PROMPT, CACHED)
    stage.decode([drafting(1, 20)], rows=[1])
    stage.overwrite(CACHED)  # the prefix cache has evicted it

    found = stage.decode([after(1, accepted, 25)], rows=[1])

    torch.testing.assert_close(found, stage.all_at_once(text(20, accepted, 25)))
    assert stage.num_unverified == 0


def test_requests_of_one_step_decode_again_in_different_steps(stage: FirstStage) -> None:
    for req_id in (1, 2):
        stage.compute(req_id, PROMPT, req_id)
    stage.decode([drafting(1, 20), drafting(2, 21)], rows=[1, 2])

    first = stage.decode([after(2, 1, 26)], rows=[2])
    assert stage.num_unverified == 1
    again = stage.decode([Decode(2, [27, *DRAFTS], len(PROMPT) + 3, 3)], rows=[2])
    second = stage.decode([after(1, 2, 25)], rows=[1])

    torch.testing.assert_close(first, stage.all_at_once(text(21, 1, 26)))
    torch.testing.assert_close(again[:1], stage.all_at_once([*text(21, 1, 26), 27]))
    torch.testing.assert_close(second, stage.all_at_once(text(20, 2, 25)))
    assert stage.num_unverified == 1  # of request 2


def test_a_request_that_leaves_does_not_change_the_row_of_the_next_one(stage: FirstStage) -> None:
    for req_id in (1, 2):
        stage.compute(req_id, PROMPT, req_id)
    stage.decode([drafting(1, 20), drafting(2, 21)], rows=[1, 2])
    stage.compute(3, PROMPT, row=1, free=[1])

    of_other = stage.decode([after(2, 3, 26)], rows=[2])
    found = stage.decode([Decode(3, [28], len(PROMPT), 1)], rows=[1])

    torch.testing.assert_close(of_other, stage.all_at_once(text(21, 3, 26)))
    torch.testing.assert_close(found, stage.all_at_once([*PROMPT, 28]))
    assert stage.num_unverified == 0


def test_nothing_is_kept_of_requests_that_have_left(stage: FirstStage) -> None:
    stage.compute(1, PROMPT, 1)
    stage.decode([drafting(1, 20)], rows=[1])

    stage.worker.launch(Step([], free=[1]))

    assert stage.num_unverified == 0
