"""Grammars that force tool calls, compiled by llguidance: what they allow and what they refuse."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tokenizers

from lightserve.httpserver.chat.output import added_marker_ids
from lightserve.messages.params import GrammarSpec
from lightserve.model_files import Tokenizer
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from lightserve.text.grammar.compiler import GrammarCompiler
from lightserve.text.grammar.vocabulary import GrammarVocabulary
from lightserve.text.json_schema.tool_schema import ToolSchema
from lightserve.text.parsing.reasoning import HARMONY, THINK
from lightserve.text.parsing.tool_calls.base import ToolFormat
from lightserve.text.parsing.tool_calls.formats import TOOL_FORMATS, TOOL_FORMATS_BY_NAME
from lightserve.text.parsing.tool_grammar import (
    ANY_OBJECT,
    Calls,
    Thinking,
    call_or_answer_grammar,
    call_or_text_grammar,
    enforceable_format,
    forced_grammar,
)
from test.real_model import smollm2_tokenizer as smol
from test.text.parsing.corpus import (
    CORPUS,
    PARIS,
    channel,
    commentary,
    deepseek,
    k2,
    kimi,
    new_parser,
    parse_pieces,
    v3,
    v31,
)

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "minProperties": 1,  # a grammar cannot enforce this
}
TOOLS = {"weather": ToolSchema(WEATHER), "now": ToolSchema({})}


def listed(key: str) -> list[str]:
    return [f'{{"name": "weather", "{key}": {PARIS}}}', f'{{"name": "now", "{key}": {{}}}}']


def tagged(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


TWO_CALLS = {
    "hermes": "\n".join(map(tagged, listed("arguments"))),
    "llama3_json": "; ".join(listed("parameters")),
    "mistral": f"[TOOL_CALLS][{', '.join(listed('arguments'))}]",
    "mistral_newer": f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}",
    "deepseek_v3": deepseek(v3("weather", PARIS), "\n", v3("now", "{}")),
    "deepseek_v31": deepseek(v31("weather", PARIS), v31("now", "{}")),
    "kimi_k2": kimi(k2("weather", 0, PARIS), k2("now", 1, "{}")),
    "glm45": "; ".join(listed("parameters")),
    "qwen3_coder": "; ".join(listed("parameters")),
    "pythonic": "; ".join(listed("parameters")),
    "lfm2": "; ".join(listed("parameters")),
    "olmo3": "; ".join(listed("parameters")),
    "seed_oss": "; ".join(listed("parameters")),
    "minimax_m2": "; ".join(listed("parameters")),
    "deepseek_v32": "; ".join(listed("parameters")),
    "deepseek_v4": "; ".join(listed("parameters")),
    "functiongemma": "; ".join(listed("parameters")),
    "gemma4": "; ".join(listed("parameters")),
    "granite": f"<|tool_call|>[{', '.join(listed('arguments'))}]",
    "granite-20b-fc": "\n".join(f"<function_call> {one}" for one in listed("arguments")),
    "hunyuan_a13b": f"<tool_calls>[{', '.join(listed('arguments'))}]</tool_calls>",
    "internlm": "\n".join(f"<|action_start|><|plugin|>\n{one}<|action_end|>" for one in listed("parameters")),
    "longcat": "\n".join(f"<longcat_tool_call>\n{one}\n</longcat_tool_call>" for one in listed("arguments")),
    "phi4_mini_json": f"functools[{', '.join(listed('arguments'))}]",
    "gigachat3": "\n".join(f"<|function_call|>{one}" for one in listed("arguments")),
    "nemotron": f"<TOOLCALL>[{', '.join(listed('arguments'))}]</TOOLCALL>",
    "xlam": f"[{', '.join(listed('arguments'))}]",
    "openai": commentary("weather", PARIS) + "<|start|>assistant" + commentary("now", "{}"),
}
NAMES = sorted(TWO_CALLS)


@functools.cache
def tokenizer(with_markers: bool = False) -> Tokenizer:
    """``with_markers``: the markers of every format and the reasoning tags are special tokens."""
    backend = tokenizers.Tokenizer.from_str(smol().to_json())
    if with_markers:
        backend.add_special_tokens([*{marker for one in TOOL_FORMATS for marker in one.markers}, "<think>", "</think>"])
    return Tokenizer(backend, SpecialTokens(eos="<|im_end|>"), None)


@functools.cache
def compiler(with_markers: bool) -> GrammarCompiler:
    return GrammarCompiler(GrammarVocabulary.of(tokenizer(with_markers)))


def marker_ids(tool_format: ToolFormat, with_markers: bool) -> dict[str, int]:
    own = tokenizer(with_markers)
    ids = {marker: own.token_to_id(marker) for marker in (*tool_format.markers, "<think>", "</think>")}
    return {marker: token for marker, token in ids.items() if token in own.special_ids and token is not None}


def is_accepted(spec: GrammarSpec, text: str, with_markers: bool = False) -> bool:
    """Whether the grammar accepts exactly this text."""
    matcher = compiler(with_markers).compile(spec)
    ids = tokenizer(with_markers).encode(text, add_special_tokens=False)
    return all(map(matcher.consume_token, ids)) and bool(matcher.is_accepting())


def allows(
    name: str, text: str, with_markers: bool = False, max_calls: int | None = None, thinking: Thinking | None = None
) -> bool:
    """Whether the grammar of forced calls accepts exactly this text."""
    tool_format = enforceable_format(TOOL_FORMATS_BY_NAME[name])
    grammar = forced_grammar(Calls(tool_format, TOOLS, max_calls), thinking, marker_ids(tool_format, with_markers))
    return is_accepted(GrammarSpec("lark", grammar), text, with_markers)


def test_every_format_is_covered() -> None:
    assert {tool_format.name for tool_format in TOOL_FORMATS} == set(TWO_CALLS)


@pytest.mark.parametrize("with_markers", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_calls_in_the_models_own_format_are_allowed_and_nothing_else(name: str, with_markers: bool) -> None:
    text = TWO_CALLS[name]

    assert allows(name, text, with_markers)
    assert not allows(name, text, with_markers, max_calls=1)
    assert not allows(name, "Hello", with_markers)
    assert not allows(name, "", with_markers)
    assert not allows(name, text.replace("weather", "whether"), with_markers)
    assert not allows(name, text.replace("2", '"two"'), with_markers)


ENDS = ("", "\n", " ", "\n\n", " \n\t")


def one_call(name: str) -> str:
    template = enforceable_format(TOOL_FORMATS_BY_NAME[name]).call_template
    assert template is not None
    call = template.call.replace("{name}", "weather").replace("{arguments}", PARIS).replace("{number}", "0")
    return template.begin + call + template.end


@pytest.mark.parametrize("with_markers", [False, True])
@pytest.mark.parametrize("max_calls", [None, 1])
@pytest.mark.parametrize("name", NAMES)
def test_an_output_may_end_after_a_call_and_white_space(name: str, max_calls: int | None, with_markers: bool) -> None:
    call = one_call(name)

    assert [end for end in ENDS if not allows(name, call + end, with_markers, max_calls)] == []
    assert not allows(name, call + "\nSo", with_markers, max_calls)
    for end in ENDS if max_calls is None else ():
        assert allows(name, TWO_CALLS[name] + end, with_markers)


def call_or_answer(name: str, with_markers: bool) -> tuple[GrammarSpec, str]:
    """A grammar of calls or an answer, and calls that it allows."""
    tool_format = TOOL_FORMATS_BY_NAME[name]
    calls = LOOSE.get(name) or TAGGED.get(name) or TWO_CALLS[name]
    before = call_or_answer_grammar(Calls(tool_format, TOOLS), None, marker_ids(tool_format, with_markers))
    return GrammarSpec("json_schema", '{"type": "object", "required": ["answer"]}', before), calls


@pytest.mark.parametrize("with_markers", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_calls_instead_of_an_answer_may_end_after_white_space_too(name: str, with_markers: bool) -> None:
    spec, calls = call_or_answer(name, with_markers)

    assert [end for end in ENDS if not is_accepted(spec, calls + end, with_markers)] == []


def test_a_call_can_be_forced_if_its_markers_are_added_but_not_special_tokens() -> None:
    """As in Qwen's tokenizers. llguidance takes such tokens for no text."""
    backend = tokenizers.Tokenizer.from_str(smol().to_json())
    backend.add_tokens([tokenizers.AddedToken(marker, special=False) for marker in ("<tool_call>", "</tool_call>")])
    own = Tokenizer(backend, SpecialTokens(eos="<|im_end|>"), None)
    hermes = TOOL_FORMATS_BY_NAME["hermes"]

    grammar = forced_grammar(Calls(hermes, TOOLS), None, added_marker_ids(own, hermes.markers))
    matcher = GrammarCompiler(GrammarVocabulary.of(own)).compile(GrammarSpec("lark", grammar))

    assert all(map(matcher.consume_token, own.encode(TWO_CALLS["hermes"], add_special_tokens=False)))
    assert matcher.is_accepting()


@pytest.mark.parametrize("name", NAMES)
def test_the_parser_reads_what_the_grammar_forces(name: str) -> None:
    parsed = parse_pieces(new_parser(enforceable_format(TOOL_FORMATS_BY_NAME[name]).name), TWO_CALLS[name])

    assert parsed.calls == (("weather", PARIS), ("now", "{}"))
    assert parsed.content == ""


@pytest.mark.parametrize("with_markers", [False, True])
def test_reasoning_may_precede_a_call_and_must_end_before_it(with_markers: bool) -> None:
    call = tagged(listed("arguments")[1])
    begun, free = Thinking(THINK, is_begun=True), Thinking(THINK, is_begun=False)

    assert allows("hermes", f"Hm.\n</think>\n\n{call}", with_markers, thinking=begun)
    assert not allows("hermes", f"Hm.\n</think>\n\nNo. </think> {call}", with_markers, thinking=begun)
    assert not allows("hermes", call, with_markers, thinking=begun)
    assert allows("hermes", f"<think>Hm.</think>{call}", with_markers, thinking=free)
    assert allows("hermes", call, with_markers, thinking=free)
    assert not allows("hermes", f"Hm. {call}", with_markers, thinking=free)


@pytest.mark.parametrize("with_markers", [False, True])
def test_reasoning_may_precede_any_grammar(with_markers: bool) -> None:
    special = marker_ids(TOOL_FORMATS_BY_NAME["hermes"], with_markers)

    def allowed(text: str, is_begun: bool) -> bool:
        before = call_or_answer_grammar(None, Thinking(THINK, is_begun), special)
        return is_accepted(GrammarSpec("regex", "[0-9]+", before), text, with_markers)

    assert allowed("12", is_begun=False)
    assert allowed("<think>Hm, 5?</think>12", is_begun=False)
    assert allowed("Hm, 5?</think>\n\n12", is_begun=True)
    assert not allowed("12", is_begun=True)
    assert not allowed("Hm</think>No</think>12", is_begun=True)
    assert not allowed("Hm</think>", is_begun=True)


def coder(begin: str, end: str) -> str:
    city = "<parameter=city>\nParis\n</parameter>"
    weather = f"<function=weather>\n{city}\n<parameter=days>\n2\n</parameter>\n</function>"
    return f"{begin}\n{weather}\n{end}\n{begin}\n<function=now>\n</function>\n{end}"


GLM_ARGUMENT = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
GLM_WEATHER = GLM_ARGUMENT.format("city", "Paris") + GLM_ARGUMENT.format("days", "2")
# calls whose arguments are between tags
TAGGED = {
    "qwen3_coder": coder("<tool_call>", "</tool_call>"),
    "seed_oss": coder("<seed:tool_call>", "</seed:tool_call>"),
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "glm45": f"<tool_call>weather\n{GLM_WEATHER}</tool_call>\n<tool_call>now\n</tool_call>",
}
# calls in the model's own format where a grammar cannot express the arguments
LOOSE = {
    name: samples[0].text.removeprefix("Hm.\n")
    for name, samples in CORPUS.items()
    if TOOL_FORMATS_BY_NAME[name].call_template is None and name not in TAGGED
}


def is_tagged_call_allowed(name: str, text: str, tools: Any, with_markers: bool) -> bool:
    """In free text."""
    tool_format = TOOL_FORMATS_BY_NAME[name]
    grammar = call_or_text_grammar(Calls(tool_format, tools), None, marker_ids(tool_format, with_markers))
    return is_accepted(GrammarSpec("lark", grammar), text, with_markers)


@pytest.mark.parametrize("with_markers", [False, True])
@pytest.mark.parametrize("name", TAGGED)
def test_strict_arguments_between_tags_follow_their_schema(name: str, with_markers: bool) -> None:
    calls = TAGGED[name]

    def allowed(text: str) -> bool:
        return is_tagged_call_allowed(name, text, TOOLS, with_markers)

    assert allowed("It is 4, <b>not</b> 5.")
    assert allowed(calls)
    assert allowed(f"Let me see.\n{calls}\nOk.")
    assert allowed(calls.replace("Paris", 'any "text" <b>\nof 2 lines'))
    assert not allowed(calls.replace("2", "two"))
    assert not allowed(f"Let me see.\n{calls}\nOk.".replace("2", "two"))
    assert not allowed(calls.replace("weather", "whether"))
    assert not allowed(calls.replace("city", "town"))
    assert parse_pieces(new_parser(name), calls).calls == (("weather", PARIS), ("now", "{}"))


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "minimax_m2"])
def test_a_call_without_the_first_tag_follows_the_schema_too(name: str) -> None:
    begin, end = TOOL_FORMATS_BY_NAME[name].loose_call
    bare = "Hm. " + TAGGED[name].replace(begin, "").replace(end, "")

    assert is_tagged_call_allowed(name, bare, TOOLS, with_markers=False)
    assert not is_tagged_call_allowed(name, bare.replace("2", "two"), TOOLS, with_markers=False)


def test_a_malformed_list_of_required_arguments_is_ignored() -> None:
    tools = {"weather": ToolSchema(WEATHER | {"required": 1})}

    assert is_tagged_call_allowed("glm45", "<tool_call>weather\n</tool_call>", tools, with_markers=False)
    assert not is_tagged_call_allowed("glm45", "<tool_call>weather\n</tool_call>", TOOLS, with_markers=False)


ALL_KINDS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "dark blue"]},
        "size": {"$ref": "#/$defs/Size"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["color"],
    "$defs": {"Size": {"type": "array", "items": {"type": "integer"}}},
}


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({"color": "red"}, True),
        ({"color": "dark blue", "size": "[1, 2]", "note": "null"}, True),
        ({"color": "red", "note": "any"}, True),
        ({"color": "green"}, False),
        ({"size": "[1]"}, False),
        ({"color": "red", "size": "1"}, False),
        ({"color": "red", "other": "1"}, False),
    ],
)
@pytest.mark.parametrize("with_markers", [False, True])
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_arguments_of_every_kind_follow_their_schema(
    name: str, with_markers: bool, arguments: dict[str, str], is_right: bool
) -> None:
    template = "<parameter={}>\n{}\n</parameter>\n" if name == "qwen3_coder" else GLM_ARGUMENT
    inner = "".join(template.format(*pair) for pair in arguments.items())
    call = f"<function=paint>\n{inner}</function>\n" if name == "qwen3_coder" else f"paint\n{inner}"
    text = f"<tool_call>{call}</tool_call>"

    assert is_tagged_call_allowed(name, text, {"paint": ToolSchema(ALL_KINDS)}, with_markers) == is_right
    assert is_tagged_call_allowed(name, text, {"paint": ANY_OBJECT}, with_markers)


@pytest.mark.parametrize("with_markers", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_model_may_call_a_tool_or_answer_by_its_grammar(name: str, with_markers: bool) -> None:
    spec, calls = call_or_answer(name, with_markers)

    assert is_accepted(spec, calls, with_markers)
    assert is_accepted(spec, '{"answer": 4}', with_markers)
    assert not is_accepted(spec, "It is 4.", with_markers)
    assert not is_accepted(spec, '{"result": 4}', with_markers)
    assert not is_accepted(spec, '{"answer": 4}' + calls, with_markers)


@pytest.mark.parametrize("with_markers", [False, True])
def test_one_call_only_if_parallel_calls_are_off(with_markers: bool) -> None:
    hermes = TOOL_FORMATS_BY_NAME["hermes"]
    special = marker_ids(hermes, with_markers)
    one, two = tagged(listed("arguments")[0]), TWO_CALLS["hermes"]
    either = GrammarSpec("regex", "[0-9]+", call_or_answer_grammar(Calls(hermes, TOOLS, 1), None, special))
    free = GrammarSpec("lark", call_or_text_grammar(Calls(hermes, TOOLS, 1), None, special))

    assert is_accepted(either, one, with_markers)
    assert not is_accepted(either, two, with_markers)
    assert is_accepted(free, f"Hm. {one}", with_markers)
    assert not is_accepted(free, f"Hm. {one.replace('2', 'two')}", with_markers)


@pytest.mark.parametrize("with_markers", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in {*LOOSE, *TAGGED, "openai"}])
def test_the_arguments_of_strict_tools_follow_their_schema_in_free_text(name: str, with_markers: bool) -> None:
    tool_format = TOOL_FORMATS_BY_NAME[name]
    grammar = call_or_text_grammar(Calls(tool_format, TOOLS), None, marker_ids(tool_format, with_markers))
    spec = GrammarSpec("lark", grammar)
    calls = TWO_CALLS[name]

    assert is_accepted(spec, "It is 4, <b>not</b> 5.", with_markers)
    assert is_accepted(spec, calls, with_markers)
    assert not is_accepted(spec, calls.replace("weather", "whether"), with_markers)
    assert not is_accepted(spec, calls.replace("2", '"two"'), with_markers)
    if name not in ("llama3_json", "xlam"):  # their calls are the whole output
        assert is_accepted(spec, f"Let me see.\n{calls}\nOk.", with_markers)
        assert not is_accepted(spec, f"Let me see.\n{calls}\nOk.".replace("2", '"two"'), with_markers)


@pytest.mark.parametrize("with_markers", [False, True])
def test_harmony_reasons_calls_and_answers_in_its_channels(with_markers: bool) -> None:
    tool_format = TOOL_FORMATS_BY_NAME["openai"]
    calls, special = Calls(tool_format, TOOLS), marker_ids(tool_format, with_markers)
    thinking = Thinking(HARMONY, is_begun=False)
    answer = GrammarSpec("regex", "[0-9]+", call_or_answer_grammar(calls, thinking, special))
    free = GrammarSpec("lark", call_or_text_grammar(calls, thinking, special))
    reasoning = channel("analysis", "Hm.") + "<|start|>assistant"

    for text in (commentary("now", "{}"), channel("final", "12", "")):
        for before in ("", reasoning):
            assert is_accepted(answer, before + text, with_markers)
            assert is_accepted(free, before + text, with_markers)
    assert not is_accepted(answer, "12", with_markers)
    assert not is_accepted(answer, channel("final", "x", ""), with_markers)
    assert not is_accepted(free, commentary("then", "{}"), with_markers)
