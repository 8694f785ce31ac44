"""Messages of an engine reach each gateway in its own ids."""

from __future__ import annotations

from lightserve.links.translation import engine_id, for_gateways
from lightserve.messages.int_arrays import int32s, int64s
from lightserve.messages.output import BatchTokenIdOut
from lightserve.messages.step import DraftColumns


def test_a_gateway_gets_the_drafts_of_its_own_requests() -> None:
    ids = [engine_id(1, 7), engine_id(2, 7), engine_id(1, 8), engine_id(3, 9)]
    drafts = DraftColumns(int64s(ids), int32s([4, 3, 2, 1]), int32s([1, 2, 0, 1]))

    batches = dict(for_gateways(BatchTokenIdOut(drafts=drafts), sessions=[1, 2]))

    by_session = {
        session: list(batch.drafts.rows()) for session, batch in batches.items() if isinstance(batch, BatchTokenIdOut)
    }
    assert by_session == {1: [(7, 4, 1), (8, 2, 0)], 2: [(7, 3, 2)]}
