"""Formats detected from the chat templates of real models, and the names that other servers give to formats.

template_markers.json has the tags and markers of real chat templates, in their order, without the rest of the template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightserve.errors import ServerError
from lightserve.text.parsing.reasoning import reasoning_format
from lightserve.text.parsing.tool_calls.formats import ALIASES, TOOL_FORMATS_BY_NAME, tool_format

TEMPLATES: dict[str, Any] = json.loads(Path(__file__).with_name("template_markers.json").read_text())
# vLLM's and SGLang's lists of November 2026
TOOL_PARSERS = """
    deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 ernie45 glm45 glm47 granite granite-20b-fc granite4 hermes
    poolside_v1 hunyuan_a13b internlm jamba lfm2 kimi_k2 ling3 llama3_json llama4_json llama4_pythonic longcat mimo
    minimax_m2 mistral olmo3 openai phi4_mini_json pythonic qwen3_coder qwen3_xml seed_oss step3p5 xlam gigachat3
    functiongemma gemma4 deepseekv3 deepseekv31 deepseekv32 glm gpt-oss interns1 llama3 minimax-m2 qwen qwen25
"""
UNSUPPORTED_TOOL_PARSERS = """
    apertus cohere_command3 cohere_command4 dots hy_v3 inkling kimi_k3 minicpm5 minimax_m3 muse_glimmer step3
"""
REASONING_PARSERS = """
    deepseek_r1 deepseek_v3 deepseek_v4 poolside_v1 cohere_command3 cohere_command4 ernie45 gemma4 glm45 glm47 ling3
    openai_gptoss granite holo2 hunyuan_a13b hy_v3 kimi_k2 mimo minimax_m2 mistral nemotron_v3 olmo3 qwen3 seed_oss
    step3 step3p5 deepseek-r1 deepseek-v3 gpt-oss kimi minimax qwen3-thinking interns1
"""


@pytest.mark.parametrize("model", TEMPLATES)
def test_the_formats_of_a_real_template_are_detected(model: str) -> None:
    expected = TEMPLATES[model]
    template = "\n".join(expected["markers"])

    tools, reasoning = tool_format("auto", template), reasoning_format("auto", template)

    assert (tools and tools.name) == expected["tools"]
    assert (reasoning and reasoning.begin) == expected["reasoning"]


@pytest.mark.parametrize("name", TOOL_PARSERS.split())
def test_the_names_of_other_servers_for_tool_call_parsers_are_known(name: str) -> None:
    assert tool_format(name, "") is not None


@pytest.mark.parametrize("name", REASONING_PARSERS.split())
def test_the_names_of_other_servers_for_reasoning_parsers_are_known(name: str) -> None:
    assert reasoning_format(name, "") is not None


@pytest.mark.parametrize("name", UNSUPPORTED_TOOL_PARSERS.split())
def test_a_format_that_is_not_supported_is_refused_by_name(name: str) -> None:
    with pytest.raises(ServerError, match=name):
        tool_format(name, "")


def test_no_alias_hides_a_format() -> None:
    assert not set(ALIASES) & set(TOOL_FORMATS_BY_NAME)
