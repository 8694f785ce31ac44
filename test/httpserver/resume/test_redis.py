"""Replies of Redis from bytes that come in pieces."""

from __future__ import annotations

import pytest

from lightserve.httpserver.resume.redis import RedisError, Reply, ReplyParser, encode_command
from test.cpu_time import growth

PLAIN = b"+OK\r\n:-7\r\n$5\r\na\r\nbc\r\n$0\r\n\r\n$-1\r\n*-1\r\n*0\r\n-ERR no such key\r\n"
WIRE = PLAIN + b"*2\r\n$1\r\nx\r\n*2\r\n:1\r\n*1\r\n$-1\r\n"
REPLIES = [b"OK", -7, b"a\r\nbc", b"", None, None, [], "ERR no such key", [b"x", [1, [None]]]]
PIECE = 1000  # bytes


def parse(*pieces: bytes) -> list[Reply]:
    parser = ReplyParser()
    replies = [reply for piece in pieces for reply in parser.parse(piece)]
    return [str(reply) if isinstance(reply, RedisError) else reply for reply in replies]


def test_replies_are_the_same_wherever_they_are_cut() -> None:
    assert parse(WIRE) == REPLIES
    assert parse(*(WIRE[at : at + 1] for at in range(len(WIRE)))) == REPLIES
    for at in range(len(WIRE)):
        assert parse(WIRE[:at], WIRE[at:]) == REPLIES


def test_the_time_to_parse_a_reply_is_linear() -> None:
    def parse_entries(count: int) -> None:
        """As XRANGE returns them."""
        entry = b"*2\r\n$3\r\n7-0\r\n*4\r\n$4\r\nouts\r\n$3\r\nabc\r\n$6\r\nevents\r\n$200\r\n" + b"x" * 200 + b"\r\n"
        wire = b"*%d\r\n" % count + entry * count
        assert len(parse(*(wire[at : at + PIECE] for at in range(0, len(wire), PIECE)))[0]) == count

    assert growth(parse_entries, 4000) < 8


def test_the_time_to_parse_one_long_string_is_linear() -> None:
    def parse_string(size: int) -> None:
        wire = b"$%d\r\n" % size + b"x" * size + b"\r\n"
        assert len(parse(*(wire[at : at + PIECE] for at in range(0, len(wire), PIECE)))[0]) == size

    assert growth(parse_string, 16 * 2**20) < 8


@pytest.mark.parametrize("wire", [b"HTTP/1.1 200 OK\r\n", b"$x\r\n", b":1x\r\n", b"*\r\n", b"\r\n"])
def test_what_is_no_reply_is_an_error(wire: bytes) -> None:
    with pytest.raises(ConnectionError, match="the reply is none of Redis"):
        parse(wire)


def test_commands_are_lists_of_strings() -> None:
    assert encode_command((b"SET", b"k", 12)) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\n12\r\n"
