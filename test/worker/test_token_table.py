"""The table of texts beside a draft head: few rows, which requests with predictions share."""

from __future__ import annotations

import pytest
import torch

from lightserve.messages.int_arrays import GrowingArray
from lightserve.messages.params import SamplingParams
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.speculation import token_table
from lightserve.worker.speculation.token_table import TokenTable

MAX_REQS, MAX_LEN = 6, 20


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> TokenTable:
    monkeypatch.setattr(token_table, "PREDICTED_ROWS", 2)
    return TokenTable(MAX_REQS, MAX_LEN, torch.device("cpu"), only_predictions=True)


def entered(table: TokenTable, row: int, prediction: tuple[int, ...] = ()) -> InferReq:
    prompt = GrowingArray([10 + row, 20 + row])
    req = InferReq(row, row, prompt, 2, SamplingParams(prediction_ids=prediction), seed=0, eos_ids=())
    table.add(req)
    return req


def text_of(table: TokenTable, req: InferReq, tokens: int) -> list[int]:
    """Its prediction, -1 and its tokens."""
    row = table.token_ids[table.rows_of(torch.tensor([req.row]))[0]]
    return row[table.begins[req.row] : table.text_begin + tokens].tolist()


def test_only_requests_with_predictions_have_rows(table: TokenTable) -> None:
    first, other, second = entered(table, 0, (7, 8)), entered(table, 1), entered(table, 2, (9,))

    table.record(torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([2, 2, 2]), torch.tensor([70, 71, 72]))

    assert table.token_ids.shape[0] == 3
    assert [table.holds(req) for req in (first, other, second)] == [True, False, True]
    assert text_of(table, first, 3) == [7, 8, -1, 10, 20, 70]
    assert text_of(table, second, 3) == [9, -1, 12, 22, 72]


def test_the_oldest_request_loses_its_row_to_a_new_one(table: TokenTable) -> None:
    first, second, third = (entered(table, row, (7,)) for row in range(3))

    table.record(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2, 2]), torch.tensor([70, 72]))

    assert [table.holds(req) for req in (first, second, third)] == [False, True, True]
    assert text_of(table, third, 3) == [7, -1, 12, 22, 72]


def test_a_request_that_left_leaves_its_row_to_the_next_in_its_place(table: TokenTable) -> None:
    _, second = entered(table, 0, (7,)), entered(table, 1, (7,))

    assert not table.holds(entered(table, 0))
    third = entered(table, 3, (9,))

    assert table.holds(second)
    assert text_of(table, third, 2) == [9, -1, 13, 23]


def test_without_a_head_all_requests_have_rows() -> None:
    table = TokenTable(MAX_REQS, MAX_LEN, torch.device("cpu"))

    reqs = [entered(table, row) for row in range(MAX_REQS)]

    assert all(map(table.holds, reqs))
    assert [text_of(table, req, 2) for req in reqs] == [[10 + row, 20 + row] for row in range(MAX_REQS)]
