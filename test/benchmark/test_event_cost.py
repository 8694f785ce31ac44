"""The cost of an event is measured for every API, in this process."""

from __future__ import annotations

import asyncio

import pytest

from benchmark.serving.event_cost import CASES, Case, cost_us
from test.real_model import smollm2_tokenizer


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_stream_of_every_case_reaches_its_end(case: Case) -> None:
    assert asyncio.run(cost_us(case, smollm2_tokenizer(), tokens=200)) > 0
