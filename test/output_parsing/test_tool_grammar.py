"""Grammars that force tool calls, compiled by llguidance: what they allow and what they refuse."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tokenizers

from lightserve.grammar.compiler import GrammarCompiler
from lightserve.io_struct import GrammarSpec
from lightserve.model_files import Tokenizer
from lightserve.model_files.special_tokens import SpecialTokens
from lightserve.output_parsing.reasoning import THINK
from lightserve.output_parsing.tool_calls.formats import TOOL_FORMATS, TOOL_FORMATS_BY_NAME
from lightserve.output_parsing.tool_grammar import Thinking, enforceable_format, forced_grammar, thinking_grammar
from test.output_parsing.corpus import PARIS, commentary, deepseek, k2, kimi, new_parser, parse_pieces, v3, v31
from test.real_model import smollm2_tokenizer as smol

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "minProperties": 1,  # a grammar cannot enforce this
}
TOOLS = {"weather": WEATHER, "now": {}}


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
    return GrammarCompiler(tokenizer(with_markers))


def allows(
    name: str, text: str, with_markers: bool = False, max_calls: int | None = None, thinking: Thinking | None = None
) -> bool:
    """Whether the grammar accepts exactly this text."""
    own = tokenizer(with_markers)
    tool_format = enforceable_format(TOOL_FORMATS_BY_NAME[name])
    ids = {marker: own.token_to_id(marker) for marker in (*tool_format.markers, "<think>", "</think>")}
    special = {marker: token for marker, token in ids.items() if token in own.special_ids and token is not None}
    grammar = forced_grammar(tool_format, TOOLS, max_calls, thinking, special)
    matcher = compiler(with_markers).compile(GrammarSpec("lark", grammar))
    return all(matcher.consume_token(token) for token in own.encode(text, add_special_tokens=False)) and bool(
        matcher.is_accepting()
    )


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
    own = tokenizer(with_markers)
    special = {tag: own.token_to_id(tag) or 0 for tag in ("<think>", "</think>") if with_markers}

    def is_accepted(text: str, is_begun: bool) -> bool:
        before = thinking_grammar(Thinking(THINK, is_begun), special)
        matcher = compiler(with_markers).compile(GrammarSpec("regex", "[0-9]+", before))
        ids = own.encode(text, add_special_tokens=False)
        return all(map(matcher.consume_token, ids)) and bool(matcher.is_accepting())

    assert is_accepted("12", is_begun=False)
    assert is_accepted("<think>Hm, 5?</think>12", is_begun=False)
    assert is_accepted("Hm, 5?</think>\n\n12", is_begun=True)
    assert not is_accepted("12", is_begun=True)
    assert not is_accepted("Hm</think>No</think>12", is_begun=True)
    assert not is_accepted("Hm</think>", is_begun=True)
