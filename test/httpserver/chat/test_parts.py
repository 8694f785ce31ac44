"""What /v1/responses and /v1/messages share: a token is a delta of the open part, from bytes that are prepared."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from lightserve.httpserver.anthropic.response import MessagesResponse
from lightserve.httpserver.chat import parts
from lightserve.httpserver.chat.choice_parser import ChoiceParser
from lightserve.httpserver.chat.parts import Events, PartsResponse
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.openai.responses.response import ResponsesResponse, ResponsesSpec
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason
from lightserve.messages.step import Token
from lightserve.text.parsing import OutputParser
from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.parser import parse_content


def plain_parser() -> ChoiceParser:
    return ChoiceParser(OutputParser(parse_content, DeltaWriter({})), True)


NewResponse = Callable[[], PartsResponse]


def responses() -> PartsResponse:
    spec = ResponsesSpec(model="tiny", response_id="resp_1")
    return ResponsesResponse(plain_parser(), AccessLog("1", "x"), spec)


def messages() -> PartsResponse:
    return MessagesResponse(plain_parser(), AccessLog("1", "x"), "tiny")


def write(response: PartsResponse, *texts: str) -> list[dict[str, Any]]:
    written = [response.write([(0, StrOut(0, text, Token(1)))]) for text in texts]
    written.append(response.write([(0, StrOut(0, "", Token(1), finish_reason=FinishReason.STOP))]))
    events = b"".join(written).decode().removesuffix("\n\n").split("\n\n")
    return [json.loads(event.partition("\ndata: ")[2]) for event in events]


@pytest.mark.parametrize("new_response", [responses, messages])
def test_more_deltas_encode_no_more_objects(new_response: NewResponse, monkeypatch: pytest.MonkeyPatch) -> None:
    objects: list[Any] = []
    encoded = parts.encoded

    def counting(events: Events) -> list[bytes]:
        objects.extend(events)
        return encoded(events)

    monkeypatch.setattr(parts, "encoded", counting)

    few = write(new_response(), "a")
    n_few = len(objects)
    many = write(new_response(), *"a" * 100)

    assert len(many) == len(few) + 99
    assert len(objects) == 2 * n_few


@pytest.mark.parametrize("new_response", [responses, messages])
@pytest.mark.parametrize("text", ['"', "\\", "\0delta\0", "\n\n", "é漢🙂", "%d%b"])
def test_a_delta_carries_any_text(new_response: NewResponse, text: str) -> None:
    events = write(new_response(), text, text)

    deltas = [
        event["delta"] for event in events if event["type"] in ("response.output_text.delta", "content_block_delta")
    ]
    assert [delta if isinstance(delta, str) else delta["text"] for delta in deltas] == [text, text]


def test_the_deltas_of_a_response_are_numbered() -> None:
    events = write(responses(), *"Hello")

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    delta = next(event for event in events if event["type"] == "response.output_text.delta")
    assert delta == {
        "type": "response.output_text.delta",
        "item_id": "msg_1_0",
        "output_index": 0,
        "content_index": 0,
        "delta": "H",
        "logprobs": [],
        "sequence_number": 4,
    }
