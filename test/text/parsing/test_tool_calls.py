"""Every tool-call format, complete and in pieces: the result does not depend on where the text is split."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import lightserve.text.parsing
from lightserve.errors import ServerError
from lightserve.text.parsing import CallArguments, CallStart, Content
from lightserve.text.parsing.delta_writer import call_id, short_call_id
from lightserve.text.parsing.tool_calls.formats import ALIASES, TOOL_FORMATS, TOOL_FORMATS_BY_NAME, tool_format
from test.text.parsing.corpus import CASES, CORPUS, PARIS, Sample, call, cut, new_parser, parse_pieces, tagged

NAMES = sorted(CORPUS)
# fragments that outputs of all formats consist of
FRAGMENTS = sorted(
    {marker for one in TOOL_FORMATS for marker in one.markers}
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
    assert set(CORPUS) == set(TOOL_FORMATS_BY_NAME)


@pytest.mark.parametrize(("name", "sample"), CASES, ids=lambda value: str(value)[:40])
def test_an_output_is_parsed(name: str, sample: Sample) -> None:
    assert parse_pieces(new_parser(name), sample.text) == sample


@pytest.mark.parametrize(("name", "sample"), CASES, ids=lambda value: str(value)[:40])
def test_splitting_in_two_or_into_characters_gives_the_same_result(name: str, sample: Sample) -> None:
    for at in range(len(sample.text) + 1):
        assert parse_pieces(new_parser(name), sample.text[:at], sample.text[at:]) == sample
    assert parse_pieces(new_parser(name), *sample.text) == sample


@settings(max_examples=300, deadline=None)
@given(case=st.sampled_from(CASES), seed=st.integers(0, 2**32))
def test_any_split_gives_the_same_result(case: tuple[str, Sample], seed: int) -> None:
    name, sample = case

    assert parse_pieces(new_parser(name), *cut(sample.text, random.Random(seed))) == sample


def check_random_outputs(count: int, seed: int) -> None:
    """Nothing raises, and the result does not depend on where the text is split."""
    rng = random.Random(seed)
    for _ in range(count):
        name = rng.choice(NAMES)
        text = random_output(rng, name)
        whole = parse_pieces(new_parser(name), text)
        assert parse_pieces(new_parser(name), *cut(text, rng)) == whole, (name, text)
        assert parse_pieces(new_parser(name), *text) == whole, (name, text)


def random_output(rng: random.Random, name: str) -> str:
    if rng.random() < 0.5:
        return "".join(rng.choices(FRAGMENTS, k=rng.randrange(12)))
    text = rng.choice(CORPUS[name]).text + rng.choice(CORPUS[name]).text
    for _ in range(rng.randrange(4)):  # a model that makes mistakes
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(["", *FRAGMENTS]) + text[at + rng.randrange(4) :]
    return text


def test_random_outputs_give_the_same_result_however_they_are_split() -> None:
    check_random_outputs(2000, seed=1)


@pytest.mark.long
def test_ten_thousand_random_outputs() -> None:
    check_random_outputs(10_000, seed=2)


def test_a_call_is_streamed_with_its_name_first() -> None:
    parser = new_parser("hermes")

    head = parser.push('Hm. <tool_call>{"name": "weather", "arguments": {"ci')
    rest = [parser.push(piece) for piece in ('ty": "Par', 'is"}', "}</tool", "_call>")]

    assert head == [Content("Hm."), CallStart(0, "id", "weather"), CallArguments(0, '{"ci')]
    assert rest == [[CallArguments(0, 'ty": "Par')], [CallArguments(0, 'is"}')], [], []]
    assert parser.finish() == []


def test_text_is_held_back_only_while_it_may_start_a_call() -> None:
    parser = new_parser("hermes")

    assert parser.push("a <tool") == [Content("a")]
    assert parser.push("box> b") == [Content(" <toolbox> b")]


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("glm45", "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>"),
        ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>\n"),
    ],
)
def test_a_string_between_tags_is_streamed_as_it_is_written(name: str, before: str) -> None:
    parser = new_parser(name)

    assert parser.push(before) == [CallStart(0, "id", "write"), CallArguments(0, '{"text": "')]
    assert parser.push('a "b" ') == [CallArguments(0, 'a \\"b\\" ')]
    assert parser.push("日本\tc") == [CallArguments(0, "日本\\tc")]


def test_calls_beyond_max_calls_are_dropped() -> None:
    text = tagged(call("weather", PARIS)) + tagged(call("now", "{}")) + "ok"

    assert parse_pieces(new_parser("hermes", max_calls=1), text) == Sample(text, "ok", (("weather", PARIS),))


def test_call_ids_have_the_form_that_clients_and_templates_expect() -> None:
    assert call_id() != call_id()
    assert call_id().startswith("call_")
    assert len(short_call_id()) == 9
    assert short_call_id().isalnum()


def test_kimi_and_mistral_keep_the_ids_that_the_model_wrote() -> None:
    starts = []
    for name, text in (
        ("kimi_k2", CORPUS["kimi_k2"][0].text),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}"),
    ):
        starts += [delta.id for delta in new_parser(name).push(text) if isinstance(delta, CallStart)]

    assert starts == ["functions.weather:0", "functions.now:1", "abcdefghi"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>\n{{ call.arguments | tojson }}{% endif %}", "hermes"),
        ("<tool_call>{{ name }}\n<arg_key>", "glm45"),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder"),
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
def test_the_format_is_detected_from_the_chat_template(template: str, expected: str | None) -> None:
    found = tool_format("auto", template)

    assert (found and found.name) == expected


def test_the_format_can_be_set_by_name() -> None:
    assert all(tool_format(name, "") is one for name, one in (TOOL_FORMATS_BY_NAME | ALIASES).items())
    assert tool_format("none", "<tool_call>") is None
    with pytest.raises(ServerError, match=r"unknown --tool_call_parser 'herms'; use one of auto, none, .*hermes"):
        tool_format("herms", "")


def test_complete_arguments_are_json() -> None:
    for _, sample in CASES:
        for _, arguments in parse_pieces(new_parser("hermes"), sample.text).calls:
            if arguments.count("{") == arguments.count("}") and "'" not in arguments:
                json.loads(arguments)


def test_no_output_is_evaluated() -> None:
    folder = Path(lightserve.text.parsing.__file__).parent
    calls = [
        ast.unparse(node.func)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]

    assert "ast.parse" in calls
    assert not {"eval", "exec", "compile", "ast.literal_eval", "__import__"} & set(calls)
