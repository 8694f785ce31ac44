"""All tool-call formats, and the choice of the one that a model uses."""

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

# in the order of the search: a chat template may also contain the markers of a later format
TOOL_FORMATS = (
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
TOOL_FORMATS_BY_NAME = {one.name: one for one in TOOL_FORMATS}
# the names that vLLM and LightLLM use
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
    """The format by name; ``auto``: the one whose markers are in the chat template, or None."""
    if choice == "none":
        return None
    if choice == "auto":
        return next((one for one in TOOL_FORMATS if any(marker in template for marker in one.template_markers)), None)
    found = TOOL_FORMATS_BY_NAME.get(choice) or ALIASES.get(choice)
    if found is None:
        known = ", ".join(["auto", "none", *TOOL_FORMATS_BY_NAME, *ALIASES])
        raise ServerError(f"unknown --tool_call_parser {choice!r}; use one of {known}")
    return found
