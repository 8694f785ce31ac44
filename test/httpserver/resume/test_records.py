"""What the stream log holds of a stream: ids of events, and entries."""

from __future__ import annotations

import pytest

from lightserve.errors import StreamNotFoundError
from lightserve.httpserver.resume.records import (
    Entry,
    encode_outs,
    new_stream_id,
    owner_hash,
    parse_event_id,
    with_ids,
)
from lightserve.messages.output import StrOut
from lightserve.messages.step import Token

OUTS = [(0, StrOut(7, "a", Token(1, logprob=-0.5)))]


def entry(events: bytes, last: int) -> Entry:
    return Entry.of([b"%d-0" % last, [b"outs", encode_outs(OUTS), b"events", events]])


def test_every_event_of_a_step_has_an_id_of_its_own() -> None:
    events, last = with_ids(b"event: x\ndata: 1\n\ndata: 2\n\n", b"s", 4)

    assert events == b"event: x\ndata: 1\nid: s.5\n\ndata: 2\nid: s.6\n\n"
    assert last == 6


@pytest.mark.parametrize(("number", "left"), [(3, [4, 5, 6]), (4, [5, 6]), (5, [6]), (6, []), (9, [])])
def test_an_entry_gives_the_events_after_a_number(number: int, left: list[int]) -> None:
    events, last = with_ids(b"data: 4\n\ndata: 5\n\ndata: 6\n\n", b"s", 3)

    found = entry(events, last).after(number)

    assert found == b"".join(b"data: %d\nid: s.%d\n\n" % (one, one) for one in left)


def test_an_entry_has_the_tokens_of_its_events() -> None:
    assert entry(b"", 1).outs == OUTS
    assert not entry(b"", 1).is_end
    assert Entry.of([b"1-1", [b"outs", encode_outs([])]]).is_end


def test_ids_are_random_and_can_be_parsed() -> None:
    one, two = new_stream_id(), new_stream_id()

    assert one != two
    assert parse_event_id(f"{one.decode()}.12") == (one, 12)


@pytest.mark.parametrize("text", ["", "x", "a.b", "A" * 22, "A" * 22 + ".", "A" * 23 + ".1", "A" * 22 + ".-1"])
def test_what_is_no_id_is_an_unknown_stream(text: str) -> None:
    with pytest.raises(StreamNotFoundError):
        parse_event_id(text)


def test_the_owner_of_a_stream_is_a_hash_of_its_keys() -> None:
    assert owner_hash([b"a"]) == owner_hash([b"a"])
    assert len({owner_hash([]), owner_hash([b"a"]), owner_hash([b"b"])}) == 3
    assert b"a".hex() != owner_hash([b"a"])
