"""Two proposers, one before the other."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.messages.int_arrays import Int64Array, int64s
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.verification import NO_DRAFT
from lightserve.worker.speculation.predictions_first import PredictionsFirst

READY = torch.tensor([4, 5, 6], dtype=torch.int32)


class Fixed:
    """Proposes these drafts, of those requests that may have some."""

    def __init__(self, *by_req: list[int]) -> None:
        self._by_req = by_req

    def propose(self, reqs: Sequence[InferReq], counts: Int64Array, ready_len: Tensor) -> Tensor:
        drafts = [ids[:count] for ids, count in zip(self._by_req, counts.tolist(), strict=True)]
        return torch.tensor([token_id for ids in drafts for token_id in ids], dtype=torch.int64)


def always(req: InferReq) -> bool:
    return True


def reqs_of(*predictions: tuple[int, ...]) -> list[Any]:
    return [SimpleNamespace(sampling=SimpleNamespace(prediction_ids=ids)) for ids in predictions]


def test_a_request_has_all_drafts_of_its_prediction_if_that_has_the_first() -> None:
    of_predictions = Fixed([NO_DRAFT, NO_DRAFT], [], [7, NO_DRAFT])
    fallback = Fixed([1, 2], [], [3, 4])

    drafts = PredictionsFirst(of_predictions, fallback, always).propose(
        reqs_of((9,), (9,), (9,)), int64s([2, 0, 2]), READY
    )

    assert drafts.tolist() == [1, 2, 7, NO_DRAFT]


@pytest.mark.parametrize(
    ("predictions", "expected"),
    [(((), (9,), ()), [11, 5, 6, 14]), (((), (), ()), [11, 12, 13, 14]), (((9,),) * 3, [1, 5, 6, 3])],
)
def test_only_requests_with_a_prediction_have_drafts_of_it(predictions: Any, expected: list[int]) -> None:
    proposer = PredictionsFirst(Fixed([1], [5, 6], [3]), Fixed([11], [12, 13], [14]), always)

    assert proposer.propose(reqs_of(*predictions), int64s([1, 2, 1]), READY).tolist() == expected


def test_steps_without_drafts_have_none() -> None:
    proposer = PredictionsFirst(Fixed([], [], []), Fixed([], [], []), always)

    assert proposer.propose(reqs_of((1,), (), ()), int64s([0, 0, 0]), READY).tolist() == []


def test_a_prediction_that_is_not_held_has_no_drafts() -> None:
    reqs = reqs_of((9,), (9,), ())

    proposer = PredictionsFirst(Fixed([], [5, 6], []), Fixed([11], [12, 13], [14]), lambda req: req is reqs[1])

    assert proposer.propose(reqs, int64s([1, 2, 1]), READY).tolist() == [11, 5, 6, 14]
