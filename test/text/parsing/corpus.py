"""Model outputs in every format, well-formed and malformed, with the expected result."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

from lightserve.text.json_schema.tool_schema import ToolSchema
from lightserve.text.parsing import OutputParser, merge_deltas
from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.tool_calls.formats import TOOL_FORMATS_BY_NAME

CITY: dict[str, Any] = {"$ref": "#/$defs/City"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {},
    "write": {"properties": {"text": {"type": "string"}}},
    "union": {
        "properties": {
            "maybe": {"type": ["string", "null"]},
            "any": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
            "list": {"oneOf": [{"type": "string"}, {"type": "array"}]},
            "ref": CITY,
            "all": {"allOf": [CITY], "description": "a city"},
            "enum": {"enum": ["1", "2"]},
            "const": {"const": "null"},
            "number": {"type": ["integer", "null"]},
        },
        "$defs": {"City": {"anyOf": [{"$ref": "#/$defs/Name"}]}, "Name": {"type": "string"}},
    },
}
TOOLS = {name: ToolSchema(schema) for name, schema in SCHEMAS.items()}
PARIS = '{"city": "Paris", "days": 2}'
ODD = '{"text": "a \\"b\\" \\\\ </tool_call> {[ 日本 😀\\n"}'


class Sample(NamedTuple):
    """An output, its content, and its calls as (name, arguments)."""

    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def cut(text: str, rng: random.Random) -> list[str]:
    """Split the text into up to nine pieces, like a stream."""
    places = sorted(rng.sample(range(len(text) + 1), rng.randrange(min(len(text) + 1, 9))))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


def call(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


def tagged(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"  # noqa: RUF001


def v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"  # noqa: RUF001


def deepseek(*calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"  # noqa: RUF001


def k2(name: str, number: int, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def kimi(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def glm(name: str, **pairs: str) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs.items())
    return f"<tool_call>{name}\n{inner}</tool_call>"


def coder(name: str, **pairs: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


ONE = (("weather", PARIS),)
TWO = (("weather", PARIS), ("now", "{}"))
ODD_ONE = (("write", ODD),)

HERMES = [
    Sample(tagged(call("weather", PARIS)), calls=ONE),
    Sample("Sure.\n" + tagged(call("weather", PARIS)) + "\n" + tagged(call("now", "{}")) + "\n", "Sure.", TWO),
    Sample(tagged(call("write", ODD)) + "\nDone.", "Done.", ODD_ONE),
    Sample("<tool_call>" + call("weather", PARIS) + "\n" + call("now", "{}") + "</tool_call>", calls=TWO),
    Sample("<tool_call>[" + call("weather", PARIS) + ", " + call("now", "{}") + "]</tool_call>", calls=TWO),
    Sample('<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', calls=(("now", '{"a": 1}'),)),
    Sample('<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', calls=(("now", '{"a": 1}'),)),
    Sample('<tool_call>{"name": "now"}</tool_call>', calls=(("now", "{}"),)),
    Sample('<tool_call>{"name": "now", "arguments": {}, "id": [1, "}"]}</tool_call> ok', "ok", (("now", "{}"),)),
    Sample('<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call>', calls=(("now", '{"a": 1}'),)),
    Sample('<tool_call>{"name": "now", "arguments": {"a": 1</tool_call> x', "x", (("now", '{"a": 1'),)),
    Sample('<tool_call>{"name": "now", "arguments": {\'a\': 1}}</tool_call>', calls=(("now", "{'a': 1}}"),)),
    Sample('<tool_call>{"name": "now", "arguments": {"a": "cut sho', calls=(("now", '{"a": "cut sho'),)),
    Sample('<tool_call>{"name": "now", "arguments": {"a": "b\nc"}}</tool_call>', calls=(("now", '{"a": "b\\nc"}'),)),
    Sample("```json\n" + call("weather", PARIS) + "\n```", calls=ONE),
    Sample('```json\n{"name": "Ada", "arguments": {}}\n```', '```json\n{"name": "Ada", "arguments": {}}\n```'),
    Sample("So:\n```json\n[1, 2]\n```\nOk ```js", "So:\n```json\n[1, 2]\n```\nOk ```js"),
    Sample('<tool_call>{"name": "no', '<tool_call>{"name": "no'),
    Sample("<tool_call>now()</tool_call>\n ", "<tool_call>now()</tool_call>\n "),
    Sample(
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
    ),
    Sample("a < b <tool_ca> <tool_cal", "a < b <tool_ca> <tool_cal"),
    Sample("<tool_call><tool_call>" + call("now", "{}") + "</tool_call>", "<tool_call>", (("now", "{}"),)),
]
LLAMA = [
    Sample('{"name": "weather", "parameters": ' + PARIS + "}", calls=ONE),
    Sample(' <|python_tag|>{"name": "weather", "parameters": ' + PARIS + "}", calls=ONE),
    Sample(call("weather", PARIS) + "; " + call("now", "{}"), calls=TWO),
    Sample("[" + call("weather", PARIS) + ", " + call("now", "{}") + "]", calls=TWO),
    Sample("<|python_start|>" + call("now", "{}") + "<|python_end|>", calls=(("now", "{}"),)),
    Sample('{"city": "Paris"} is it.', '{"city": "Paris"} is it.'),
    Sample('{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}'),
    Sample('{"name": "now", "parameters": {}} bye', "bye", (("now", "{}"),)),
    Sample('<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")'),
    Sample("Hello {", "Hello {"),
    Sample("[1, 2]\n", "[1, 2]\n"),
]
MISTRAL = [
    Sample("[TOOL_CALLS][" + call("weather", PARIS) + ", " + call("now", "{}") + "]", calls=TWO),
    Sample("[TOOL_CALLS] [" + call("write", ODD) + "] ", calls=ODD_ONE),
    Sample("Well. [TOOL_CALLS]weather[ARGS]" + PARIS + "[TOOL_CALLS]now[ARGS]{}", "Well.", TWO),
    Sample("[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", calls=(("now", "{}"),)),
    Sample("[TOOL_CALLS]now[ARGS]{'a'[TOOL_CALLS]now[ARGS]{}", calls=(("now", "{'a'"), ("now", "{}"))),
    Sample("[TOOL_CALLS]what is[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]what is", (("now", "{}"),)),
    Sample("[TOOL_CALLS][1]", "[TOOL_CALLS][1]"),
    Sample("[TOOL_", "[TOOL_"),
]
DEEPSEEK = [
    Sample(deepseek(v3("weather", PARIS), "\n", v3("now", "{}")), calls=TWO),
    Sample("Let me see." + deepseek(v31("weather", PARIS), v31("now", "{}")), "Let me see.", TWO),
    Sample(deepseek(v31("function", "{}")), calls=(("function", "{}"),)),
    Sample(v31("write", ODD), calls=ODD_ONE),
    Sample(deepseek(v31("write", "{'a'")), calls=(("write", "{'a'"),)),
    Sample(deepseek("no call"), deepseek("no call")),
    Sample(deepseek(v3("two words", "{}")), deepseek(v3("two words", "{}"))),
    Sample(deepseek(v3("now", "{}"))[:30], deepseek(v3("now", "{}"))[:30]),
]
KIMI = [
    Sample(kimi(k2("weather", 0, PARIS), k2("now", 1, "{}")), calls=TWO),
    Sample("Hm. " + kimi(k2("write", 0, ODD)) + " So.", "Hm. So.", ODD_ONE),
    Sample(k2("write", 0, '{"a"').removesuffix("<|tool_call_end|>"), calls=(("write", '{"a"'),)),
    Sample(kimi(), kimi()),
    Sample(kimi("<|tool_call_begin|>"), kimi("<|tool_call_begin|>")),
]
UNION_TEXTS = {"maybe": "123", "any": "0012", "list": "true", "ref": "{}", "all": "12", "enum": "1", "const": "null"}
UNIONS = [
    (UNION_TEXTS, json.dumps(UNION_TEXTS)),
    ({"maybe": "null", "any": "None", "number": "null"}, '{"maybe": null, "any": null, "number": null}'),
    ({"maybe": "nullable", "any": " nul", "number": "7"}, '{"maybe": "nullable", "any": " nul", "number": 7}'),
    ({"list": '["ls", "-l"]', "maybe": "[1]"}, '{"list": ["ls", "-l"], "maybe": "[1]"}'),
    ({"list": "[not JSON", "any": ""}, '{"list": "[not JSON", "any": ""}'),
    ({"list": '{"a": 1}', "maybe": " " * 20 + "null"}, f'{{"list": "{{\\"a\\": 1}}", "maybe": "{" " * 20}null"}}'),
]
GLM = [
    *(Sample(glm("union", **pairs), calls=(("union", expected),)) for pairs, expected in UNIONS),
    Sample(glm("weather", city="Paris", days="2") + "\n" + glm("now"), calls=TWO),
    Sample("Yes." + glm("write", text="3"), "Yes.", (("write", '{"text": "3"}'),)),
    Sample(
        glm("f", a="[1, {}]", b="x y", c="null", d="NaN"),
        calls=(("f", '{"a": [1, {}], "b": "x y", "c": null, "d": "NaN"}'),),
    ),
    Sample("<tool_call>now</tool_call>", calls=(("now", "{}"),)),
    Sample(
        "<tool_call>write<arg_key>text</arg_key><arg_value>日本 <b>\n",
        calls=(("write", '{"text": "日本 <b>\\n'),),
    ),
    Sample("<tool_call>f\n<arg_key>a</arg_key>b</tool_call>", calls=(("f", "{<arg_key>a</arg_key>b"),)),
    Sample(tagged(call("now", "{}")), tagged(call("now", "{}"))),
    Sample("<tool_call>now", "<tool_call>now"),
]
CODER = [
    *(Sample(coder("union", **pairs), calls=(("union", expected),)) for pairs, expected in UNIONS),
    Sample(coder("write", text="x").removeprefix("<tool_call>\n"), calls=(("write", '{"text": "x"}'),)),
    Sample("Use <function=f>.", "Use <function=f>."),
    Sample("<tool_call><function=write><parameter=text>a\n</par", calls=(("write", '{"text": "a\\n</par'),)),
    Sample("<tool_call><function=weather><parameter=days>\n12", calls=(("weather", '{"days": 12'),)),
    Sample(coder("weather", city="Paris", days="2") + "\n" + coder("now"), calls=TWO),
    Sample(coder("write", text="a\n\nb"), calls=(("write", '{"text": "a\\n\\nb"}'),)),
    Sample(coder("f", a="True", b="None"), calls=(("f", '{"a": true, "b": null}'),)),
    Sample("<tool_call>now</tool_call>", "<tool_call>now</tool_call>"),
]
PYTHON = [
    Sample('[weather(city="Paris", days=2), now()]', calls=TWO),
    Sample("<|python_start|>[now()]<|python_end|>", calls=(("now", "{}"),)),
    Sample(
        " [write(text='it\\'s (]', a=[-1, (2.5, True), {'b': null}])]\n",
        calls=(("write", '{"text": "it\'s (]", "a": [-1, [2.5, true], {"b": null}]}'),),
    ),
    Sample("[now(), now(1)] x", ", now(1)] x", (("now", "{}"),)),
    Sample("[now(a=1) and more", "and more", (("now", '{"a": 1}'),)),
    Sample("[now(a=__import__('os').system('x'))]", "[now(a=__import__('os').system('x'))]"),
    Sample("[other()]", "[other()]"),
    Sample("[now(a=1e999)]", "[now(a=1e999)]"),
    Sample("[now(**{'a': 1})]", "[now(**{'a': 1})]"),
    Sample("[now(a='x", "[now(a='x"),
    Sample("[1, 2, 3]", "[1, 2, 3]"),
    Sample("Hello [now()]", "Hello [now()]"),
    Sample("[now(a=" + "(" * 200, "[now(a=" + "(" * 200),
]
LFM = [
    Sample('<|tool_call_start|>[weather(city="Paris", days=2), now()]<|tool_call_end|>', calls=TWO),
    Sample("Hm. <|tool_call_start|>[now()]<|tool_call_end|> Ok", "Hm. Ok", (("now", "{}"),)),
    Sample("<|tool_call_start|>no call<|tool_call_end|>", "<|tool_call_start|>no call<|tool_call_end|>"),
    Sample("<|tool_call_start|>[now(a='x", "<|tool_call_start|>[now(a='x"),
]
OLMO = [
    Sample('<function_calls>weather(city="Paris", days=2)\nnow()</function_calls>', calls=TWO),
    Sample("<function_calls>\nother(a=null)\n</function_calls>Ok", "Ok", (("other", '{"a": null}'),)),
    Sample("<function_calls>now()\nand more", "and more", (("now", "{}"),)),
    Sample("<function_calls></function_calls>", "<function_calls></function_calls>"),
]


def invoke(prefix: str, name: str, **pairs: str) -> str:
    inner = "".join(f'<{prefix}parameter name="{key}">{value}</{prefix}parameter>\n' for key, value in pairs.items())
    return f'<{prefix}invoke name="{name}">\n{inner}</{prefix}invoke>\n'


def seed(text: str) -> str:
    return text.replace("tool_call>", "seed:tool_call>")


WEATHER = {"city": "Paris", "days": "2"}
SEED = [
    Sample(seed(coder("weather", **WEATHER) + "\n" + coder("now")), calls=TWO),
    Sample(coder("write", text="x").removeprefix("<tool_call>")[:-12], calls=(("write", '{"text": "x"}'),)),
]
MINIMAX = [
    Sample(
        "Hm.\n<minimax:tool_call>\n" + invoke("", "weather", **WEATHER) + invoke("", "now") + "</minimax:tool_call>",
        "Hm.",
        TWO,
    ),
    Sample("<minimax:tool_call></minimax:tool_call>", "<minimax:tool_call></minimax:tool_call>"),
    Sample('<minimax:tool_call><invoke name="now">', calls=(("now", "{}"),)),
]


def dsml(tag: str, *calls: str) -> str:
    text = f"<｜DSML｜{tag}>\n{''.join(calls)}</｜DSML｜{tag}>"  # noqa: RUF001
    return text.replace('"city">', '"city" string="true">').replace('"days">', '"days" string="false">')


def dsml_samples(tag: str) -> list[Sample]:
    bar = "｜DSML｜"  # noqa: RUF001
    odd = invoke(bar, "f", a="1").replace('"a">', '"a" string="true">')
    return [
        Sample(dsml(tag, invoke(bar, "weather", **WEATHER), invoke(bar, "now")), calls=TWO),
        Sample("So. " + dsml(tag, odd) + " Ok.", "So. Ok.", (("f", '{"a": "1"}'),)),
    ]


def gemma_samples(begin: str, end: str, quote: str) -> list[Sample]:
    def one(inner: str) -> str:
        return f"{begin}call:{inner}{end}"

    weather = one(f"weather{{city:{quote}Paris{quote},days:2}}")
    nested = f'f{{a:{{b:[1,{quote}x y{quote},{{}}],c:null}},d:New York, {quote}e f{quote}:{quote}"{quote}}}'
    return [
        Sample(weather + one("now{}"), calls=TWO),
        Sample(f"Hm. {weather} Ok", "Hm. Ok", ONE),
        Sample(one(nested), calls=(("f", '{"a": {"b": [1, "x y", {}], "c": null}, "d": "New York", "e f": "\\""}'),)),
        Sample(one("no call"), one("no call")),
        Sample(f"{begin}call:write{{text:{quote}cut", calls=(("write", '{"text": "cut'),)),
        Sample(one("write{text]}"), calls=(("write", "{text]}"),)),
    ]


def json_samples(begin: str, end: str, is_list: bool = True) -> list[Sample]:
    weather, now = call("weather", PARIS), call("now", "{}")
    both = f"{begin}[{weather}, {now}]{end}" if is_list else f"{begin}{weather}{end}\n{begin}{now}{end}"
    return [
        Sample(both, calls=TWO),
        Sample("Hm.\n" + begin + call("write", ODD) + end, "Hm.", ODD_ONE),
        Sample(f"{begin}no call{end}", f"{begin}no call{end}"),
        Sample(begin + '{"name": "now", "arguments": {"a": "cut', calls=(("now", '{"a": "cut'),)),
    ]


XLAM = [
    Sample("[" + call("weather", PARIS) + ", " + call("now", "{}") + "]", calls=TWO),
    Sample("```json\n[" + call("weather", PARIS) + "]\n```"[:-4], calls=ONE),
    Sample("<tool_call>[" + call("now", "{}") + "]</tool_call>", calls=(("now", "{}"),)),
    Sample("[TOOL_CALLS][" + call("now", "{}") + "]", calls=(("now", "{}"),)),
    Sample('{"city": "Paris"} is it.', '{"city": "Paris"} is it.'),
    Sample("[1, 2]", "[1, 2]"),
]


def channel(header: str, body: str, end: str = "<|end|>") -> str:
    return f"<|channel|>{header}<|message|>{body}{end}"


def commentary(name: str, arguments: str) -> str:
    return channel(f"commentary to=functions.{name} <|constrain|>json", arguments, "<|call|>")


NEXT = "<|start|>assistant"
HARMONY = [
    Sample(commentary("weather", PARIS) + NEXT + commentary("now", "{}"), calls=TWO),
    Sample(
        channel("analysis", "Hm.") + NEXT + channel("commentary", "Wait.") + NEXT + commentary("now", "{}"),
        "Wait.",
        (("now", "{}"),),
    ),
    Sample(channel("analysis", "Hm, <b>.") + NEXT + channel("final", "It is 4.", "<|return|>"), "It is 4."),
    Sample(" to=functions.now<|channel|>commentary<|message|>{}", calls=(("now", "{}"),)),
    Sample(channel("analysis", "Hm.", "") + NEXT + channel("final", "4", ""), "4"),
    Sample(commentary("write", '{"text": "cut')[:-8], calls=(("write", '{"text": "cut'),)),
    Sample(commentary("write", "cut"), "cut"),
    Sample("<|channel|>final", "<|channel|>final"),
]
PLAIN = [Sample(""), Sample("Hello\n", "Hello\n"), Sample(" \n x  y ", " \n x  y "), Sample("😀\u2028<", "😀\u2028<")]
CORPUS: dict[str, list[Sample]] = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "mistral_newer": MISTRAL,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    "kimi_k2": KIMI,
    "glm45": GLM,
    "qwen3_coder": CODER,
    "pythonic": PYTHON,
    "lfm2": LFM,
    "olmo3": OLMO,
    "seed_oss": SEED,
    "minimax_m2": MINIMAX,
    "deepseek_v32": dsml_samples("function_calls"),
    "deepseek_v4": dsml_samples("tool_calls"),
    "functiongemma": gemma_samples("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": gemma_samples("<|tool_call>", "<tool_call|>", '<|"|>'),
    "granite": json_samples("<|tool_call|>", ""),
    "granite-20b-fc": json_samples("<function_call> ", "", is_list=False),
    "hunyuan_a13b": json_samples("<tool_calls>", "</tool_calls>"),
    "internlm": json_samples("<|action_start|><|plugin|>\n", "<|action_end|>", is_list=False),
    "longcat": json_samples("<longcat_tool_call>", "</longcat_tool_call>", is_list=False),
    "gigachat3": json_samples("<|function_call|>", "", is_list=False),
    "nemotron": json_samples("<TOOLCALL>", "</TOOLCALL>"),
    "phi4_mini_json": json_samples("functools", "") + json_samples("<|tool_call|>", "<|/tool_call|>"),
    "xlam": XLAM,
    "openai": HARMONY,
}
CASES = [(name, sample) for name, samples in CORPUS.items() for sample in [*samples, *PLAIN]]


def new_parser(name: str, max_calls: int | None = None) -> OutputParser:
    return OutputParser(TOOL_FORMATS_BY_NAME[name].parse, DeltaWriter(TOOLS, lambda: "id", max_calls))


def parse_pieces(parser: OutputParser, *pieces: str) -> Sample:
    """Parse a text in pieces. Call ids are not compared."""
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    output = merge_deltas([*deltas, *parser.finish()])
    return Sample("".join(pieces), output.content, tuple((one.name, one.arguments) for one in output.calls))
