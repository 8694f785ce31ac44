"""An error of a body names the field by its path in the body, what is expected and what was found."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.anthropic.request import MessagesBody
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.generate.lightllm.request import LightllmBody
from lightserve.httpserver.generate.tgi.request import TgiBody
from lightserve.httpserver.http.body import Body, validate
from lightserve.httpserver.ollama.request import ChatRequest
from lightserve.httpserver.openai.responses.request import ResponsesBody

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


@pytest.mark.parametrize("field", ["seed", "max_tokens", "priority"])
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (b"-9223372036854775809", "greater than or equal to -9223372036854775808"),
        (b"-123456789012345678901234567890", "greater than or equal to -9223372036854775808"),
        (b"18446744073709551616", "less than 9223372036854775808"),
        (b"5.5", "a valid integer, not a float"),
        (b"-1e18", "a valid integer, not a float"),
    ],
)
def test_an_integer_of_more_than_64_bits_is_out_of_range_and_no_float(field: str, number: bytes, message: str) -> None:
    body = orjson.loads(b'{"messages": [{"role": "user", "content": "Hi"}], "%b": %b}' % (field.encode(), number))

    with pytest.raises(InvalidRequestError) as error:
        validate(ChatBody, body)

    assert str(error.value) == f"{field}: Input should be {message}"


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        (["bad1", "5", "bad2"], "'bad1', 'bad2'"),
        (["", "-1", "1.0", "1 ", "\u0663", "9" * 10], "'', '-1', '1.0', '1 ', '\u0663', '9999999999'"),
        (["x" * 1000], "'" + "x" * 39),
        (["{keys}"], "'{keys}'"),
        ([f"a{i}" for i in range(1000)], ", ".join(f"'a{i}'" for i in range(10)) + " and 990 more"),
    ],
    ids=["two", "numbers", "long", "braces", "many"],
)
def test_all_keys_of_a_bias_that_are_no_token_ids_are_named(keys: list[str], found: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        validate(ChatBody, {"messages": [USER], "logit_bias": dict.fromkeys(keys, 1.0)})

    assert (error.value.param, str(error.value)) == ("logit_bias", f"logit_bias: keys must be token ids, not {found}")
