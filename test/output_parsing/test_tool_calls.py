"""Every format, whole and in pieces: what is in an output does not depend on how it came."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import lightserve.output_parsing
from lightserve.errors import ServerError
from lightserve.output_parsing import CallArguments, CallStart, Content
from lightserve.output_parsing.scribe import call_id, short_call_id
from lightserve.output_parsing.tool_calls.formats import ALIASES, ALL, BY_NAME, tool_format
from test.output_parsing.corpus import CASES, CORPUS, PARIS, Sample, call, cut, parser_of, tagged, taken_apart

NAMES = sorted(CORPUS)
# what the outputs of all formats are made of
SHREDS = sorted(
    {marker for one in ALL for marker in one.markers}
    | set("{}[]()\",:;\\'\n `<>|=")
    | {
        '{"name": "now", "arguments": ',
        '{"name": "',
        '"parameters": ',
        "weather(city=",
        "<function=now>",
        "<parameter=a>",
    }
    | {"functions.now:0", "now", "[now(", "a=1", "```json\n", "😀", "日", "\\u12", "\x00", "null", "-", "1e999"}
)


def test_every_format_has_a_corpus() -> None:
    assert set(CORPUS) == set(BY_NAME)


@pytest.mark.parametrize(("name", "sample"), CASES, ids=lambda value: str(value)[:40])
def test_an_output_is_taken_apart(name: str, sample: Sample) -> None:
    assert taken_apart(parser_of(name), sample.text) == sample


@pytest.mark.parametrize(("name", "sample"), CASES, ids=lambda value: str(value)[:40])
def test_every_cut_in_two_and_single_characters_give_the_same(name: str, sample: Sample) -> None:
    for at in range(len(sample.text) + 1):
        assert taken_apart(parser_of(name), sample.text[:at], sample.text[at:]) == sample
    assert taken_apart(parser_of(name), *sample.text) == sample


@settings(max_examples=300, deadline=None)
@given(case=st.sampled_from(CASES), seed=st.integers(0, 2**32))
def test_any_way_to_cut_a_text_gives_the_same(case: tuple[str, Sample], seed: int) -> None:
    name, sample = case

    assert taken_apart(parser_of(name), *cut(sample.text, random.Random(seed))) == sample


def check_random_outputs(count: int, seed: int) -> None:
    """Nothing raises, no way to cut a text matters, and arguments that are JSON were not changed in their meaning."""
    rng = random.Random(seed)
    for _ in range(count):
        name = rng.choice(NAMES)
        text = random_output(rng, name)
        whole = taken_apart(parser_of(name), text)
        assert taken_apart(parser_of(name), *cut(text, rng)) == whole, (name, text)
        assert taken_apart(parser_of(name), *text) == whole, (name, text)


def random_output(rng: random.Random, name: str) -> str:
    if rng.random() < 0.5:
        return "".join(rng.choices(SHREDS, k=rng.randrange(12)))
    text = rng.choice(CORPUS[name]).text + rng.choice(CORPUS[name]).text
    for _ in range(rng.randrange(4)):  # a model that stumbles
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(["", *SHREDS]) + text[at + rng.randrange(4) :]
    return text


def test_random_outputs_are_taken_apart_alike_however_they_are_cut() -> None:
    check_random_outputs(2000, seed=1)


@pytest.mark.long
def test_ten_thousand_random_outputs() -> None:
    check_random_outputs(10_000, seed=2)


def test_the_name_comes_first_and_arguments_as_they_are_written() -> None:
    parser = parser_of("hermes")

    head = parser.push('Hm. <tool_call>{"name": "weather", "arguments": {"ci')
    rest = [parser.push(piece) for piece in ('ty": "Par', 'is"}', "}</tool", "_call>")]

    assert head == [Content("Hm."), CallStart(0, "id", "weather"), CallArguments(0, '{"ci')]
    assert rest == [[CallArguments(0, 'ty": "Par')], [CallArguments(0, 'is"}')], [], []]
    assert parser.finish() == []


def test_text_is_held_back_only_while_it_may_begin_a_call() -> None:
    parser = parser_of("hermes")

    assert parser.push("a <tool") == [Content("a")]
    assert parser.push("box> b") == [Content(" <toolbox> b")]


def test_calls_beyond_those_that_are_wanted_are_left_out() -> None:
    text = tagged(call("weather", PARIS)) + tagged(call("now", "{}")) + "ok"

    assert taken_apart(parser_of("hermes", max_calls=1), text) == Sample(text, "ok", (("weather", PARIS),))


@pytest.mark.parametrize("name", NAMES)
def test_a_long_output_takes_linear_time(name: str) -> None:
    """Quadratic time would be minutes here."""
    for text in (CORPUS[name][0].text.replace("Paris", "Par" + "i" * 200_000 + "s"), "{[(<" * 50_000):
        pieces = [text[at : at + 16] for at in range(0, len(text), 16)]
        taken_apart(parser_of(name), *pieces)


def test_ids_are_as_clients_and_templates_want_them() -> None:
    assert call_id() != call_id()
    assert call_id().startswith("call_")
    assert len(short_call_id()) == 9
    assert short_call_id().isalnum()


def test_kimi_and_mistral_give_the_ids_that_the_model_wrote() -> None:
    starts = []
    for name, text in (
        ("kimi_k2", CORPUS["kimi_k2"][0].text),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}"),
    ):
        starts += [delta.id for delta in parser_of(name).push(text) if isinstance(delta, CallStart)]

    assert starts == ["functions.weather:0", "functions.now:1", "abcdefghi"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>\n{{ call.arguments | tojson }}{% endif %}", "hermes"),
        ("<tool_call>{{ name }}\n<arg_key>", "glm45"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral_newer"),
        ("[TOOL_CALLS][{{ calls }}]", "mistral"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument', "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ '<|tool_calls_section_begin|>' }}", "kimi_k2"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'", "deepseek_v3"),  # noqa: RUF001
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'", "deepseek_v31"),  # noqa: RUF001
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_found_by_the_chat_template(template: str, expected: str | None) -> None:
    found = tool_format("auto", template)

    assert (found and found.name) == expected


def test_the_format_may_be_named() -> None:
    assert all(tool_format(name, "") is one for name, one in (BY_NAME | ALIASES).items())
    assert tool_format("none", "<tool_call>") is None
    with pytest.raises(ServerError, match=r"tool_call_parser='herms': choose one of auto, none, .*hermes"):
        tool_format("herms", "")


def test_arguments_that_came_whole_are_json() -> None:
    for _, sample in CASES:
        for _, arguments in taken_apart(parser_of("hermes"), sample.text).calls:
            if arguments.count("{") == arguments.count("}") and "'" not in arguments:
                json.loads(arguments)


def test_nothing_is_evaluated() -> None:
    folder = Path(lightserve.output_parsing.__file__).parent
    calls = [
        ast.unparse(node.func)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]

    assert "ast.parse" in calls
    assert not {"eval", "exec", "compile", "ast.literal_eval", "__import__"} & set(calls)
