"""An error of a body names the field by its path in the body, what is expected and what was found."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.anthropic.request import MessagesBody
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.lightllm.request import LightllmBody
from lightserve.httpserver.ollama.request import ChatRequest
from lightserve.httpserver.openai.responses.request import ResponsesBody
from lightserve.httpserver.tgi.request import TgiBody
from lightserve.httpserver.wire.body import Body, validate

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("model", "body", "param", "message"),
    [
        (ChatBody, {"messages": [USER, USER | {"content": 5}]}, "messages.1.content", "a valid string, not an integer"),
        (ChatBody, {"messages": ["Hi"]}, "messages.0", "a valid object, not a string"),
        (ChatBody, {"messages": None}, "messages", "a valid list, not null"),
        (ChatBody, {"messages": [USER], "max_tokens": 5.0}, "max_tokens", "a valid integer, not a float"),
        (ChatBody, {"messages": [USER], "stream_options": []}, "stream_options", "a valid object, not a list"),
        (ChatBody, {"messages": [USER], "logit_bias": {"5": {}}}, "logit_bias.5", "a valid number, not an object"),
        # a field of several types: the names of the types are not part of the path
        (ChatBody, {"messages": [USER], "early_stopping": 5}, "early_stopping", "a valid boolean or 'never'"),
        (LightllmBody, {"inputs": 5}, "inputs", "a valid string or a valid list, not an integer"),
        (LightllmBody, {"inputs": [5, True]}, "inputs.1", "a valid integer, not a boolean"),
        (TgiBody, {"inputs": "x", "parameters": {"stop": [5]}}, "parameters.stop.0", "a valid string, not an integer"),
        (ChatRequest, {"options": {"top_p": "x"}}, "options.top_p", "a valid number, not a string"),
        (ChatRequest, {"think": "x"}, "think", "a valid boolean or 'low', 'medium', 'high' or 'max'"),
        # an object whose type selects its fields
        (
            MessagesBody,
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages.0.content.0.text",
            "a valid string, not an integer",
        ),
        (
            ResponsesBody,
            {"input": "x", "tools": [{"type": "function", "name": 5}]},
            "tools.0.name",
            "a valid string, not an integer",
        ),
    ],
)
def test_a_wrong_type_in_a_nested_field_is_named(
    model: type[Body], body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as error:
        validate(model, body)

    assert (error.value.param, str(error.value)) == (param, f"{param}: Input should be {message}")
