"""Every format of tool calls, and the one that a model uses."""

from __future__ import annotations

from lightserve.errors import ServerError
from lightserve.output_parsing.tool_calls.base import ToolFormat
from lightserve.output_parsing.tool_calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from lightserve.output_parsing.tool_calls.hermes import HERMES
from lightserve.output_parsing.tool_calls.kimi import KIMI_K2
from lightserve.output_parsing.tool_calls.llama3_json import LLAMA3_JSON
from lightserve.output_parsing.tool_calls.mistral import MISTRAL, MISTRAL_NEWER
from lightserve.output_parsing.tool_calls.pythonic import PYTHONIC
from lightserve.output_parsing.tool_calls.tagged import GLM45, QWEN3_CODER

# in the order in which their signs are looked for: a template may have signs of a later one too
ALL = (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    GLM45,
    QWEN3_CODER,
    HERMES,
    MISTRAL_NEWER,
    MISTRAL,
    PYTHONIC,
    LLAMA3_JSON,
)
BY_NAME = {one.name: one for one in ALL}
# names that vLLM and LightLLM give them
ALIASES = {
    "qwen": HERMES,
    "qwen25": HERMES,
    "llama3": LLAMA3_JSON,
    "llama4_pythonic": PYTHONIC,
    "deepseekv3": DEEPSEEK_V3,
    "deepseekv31": DEEPSEEK_V31,
    "glm47": GLM45,
}


def tool_format(choice: str, template: str) -> ToolFormat | None:
    """By name; ``auto``: the one that the chat template shows. None where there is none."""
    if choice == "none":
        return None
    if choice == "auto":
        return next((one for one in ALL if any(sign in template for sign in one.signs)), None)
    found = BY_NAME.get(choice) or ALIASES.get(choice)
    if found is None:
        known = ", ".join(["auto", "none", *BY_NAME, *ALIASES])
        raise ServerError(f"tool_call_parser={choice!r}: choose one of {known}")
    return found
