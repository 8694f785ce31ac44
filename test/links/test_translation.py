"""Messages of an engine reach each gateway in its own ids."""

from __future__ import annotations

from lightserve.links.translation import engine_id, for_engine, for_gateways
from lightserve.messages.int_arrays import int32s, int64s
from lightserve.messages.output import AdapterReply, BatchTokenIdOut
from lightserve.messages.request import NOBODY, UnloadAdapter
from lightserve.messages.step import DraftColumns


def test_a_gateway_gets_the_drafts_of_its_own_requests() -> None:
    ids = [engine_id(1, 7), engine_id(2, 7), engine_id(1, 8), engine_id(3, 9)]
    drafts = DraftColumns(int64s(ids), int32s([4, 3, 2, 1]), int32s([1, 2, 0, 1]))

    batches = dict(for_gateways(BatchTokenIdOut(drafts=drafts), sessions=[1, 2]))

    by_session = {
        session: list(batch.drafts.rows()) for session, batch in batches.items() if isinstance(batch, BatchTokenIdOut)
    }
    assert by_session == {1: [(7, 4, 1), (8, 2, 0)], 2: [(7, 3, 2)]}


def test_an_engine_takes_a_query_whose_reply_nobody_waits_for() -> None:
    query = for_engine(3, UnloadAdapter(NOBODY, "mine"))

    assert isinstance(query, UnloadAdapter)
    replies = for_gateways(AdapterReply(query.query_id), sessions=[3, 4])
    assert replies == [(3, AdapterReply(NOBODY))]
