"""All tool-call formats, and the choice of the one that a model uses."""

from __future__ import annotations

from lightserve.errors import ServerError
from lightserve.text.parsing.tool_calls.base import ToolFormat
from lightserve.text.parsing.tool_calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from lightserve.text.parsing.tool_calls.gemma import FUNCTION_GEMMA, GEMMA4
from lightserve.text.parsing.tool_calls.harmony import HARMONY
from lightserve.text.parsing.tool_calls.hermes import HERMES
from lightserve.text.parsing.tool_calls.json_between import (
    GIGACHAT3,
    GRANITE,
    GRANITE_20B,
    HUNYUAN_A13B,
    INTERNLM,
    LONGCAT,
    NEMOTRON,
    PHI4_MINI,
    XLAM,
)
from lightserve.text.parsing.tool_calls.kimi import KIMI_K2
from lightserve.text.parsing.tool_calls.llama3_json import LLAMA3_JSON
from lightserve.text.parsing.tool_calls.mistral import MISTRAL, MISTRAL_NEWER
from lightserve.text.parsing.tool_calls.pythonic import LFM2, OLMO3, PYTHONIC
from lightserve.text.parsing.tool_calls.tagged import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    GLM45,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
)

# in the order of the search: a chat template may also contain the markers of a later format
TOOL_FORMATS = (
    HARMONY,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    SEED_OSS,
    MINIMAX_M2,
    GLM45,
    QWEN3_CODER,
    LFM2,
    OLMO3,
    FUNCTION_GEMMA,
    GEMMA4,
    INTERNLM,
    LONGCAT,
    PHI4_MINI,
    XLAM,
    GRANITE,
    GRANITE_20B,
    GIGACHAT3,
    NEMOTRON,
    HUNYUAN_A13B,
    HERMES,
    MISTRAL_NEWER,
    MISTRAL,
    PYTHONIC,
    LLAMA3_JSON,
)
TOOL_FORMATS_BY_NAME = {known_format.name: known_format for known_format in TOOL_FORMATS}
# the names that vLLM, SGLang and LightLLM use; a name may also be written with dashes
ALIASES = {
    "qwen": HERMES,
    "qwen25": HERMES,
    "qwen3": HERMES,
    "ernie45": HERMES,
    "granite4": HERMES,
    "qwen3_xml": QWEN3_CODER,
    "mimo": QWEN3_CODER,
    "step3p5": QWEN3_CODER,
    "nemotron_v3": QWEN3_CODER,
    "llama3": LLAMA3_JSON,
    "llama4_json": LLAMA3_JSON,
    "llama4_pythonic": PYTHONIC,
    "deepseekv3": DEEPSEEK_V3,
    "deepseekv31": DEEPSEEK_V31,
    "deepseekv32": DEEPSEEK_V32,
    "deepseekv4": DEEPSEEK_V4,
    "glm": GLM45,
    "glm47": GLM45,
    "ling3": GLM45,
    "poolside_v1": GLM45,
    "jamba": HUNYUAN_A13B,
    "minimax": HUNYUAN_A13B,
    "minimax_m1": HUNYUAN_A13B,
    "apriel": HUNYUAN_A13B,
    "interns1": INTERNLM,
    "phi4": PHI4_MINI,
    "gpt_oss": HARMONY,
    "gptoss": HARMONY,
    "harmony": HARMONY,
}


# Chat templates with any of these use another format, although they have markers of ours: MiniMax M3, Functionary 3.1
UNKNOWN_FORMATS = ("<mm:think>", "<function=example_function_name>{")


def tool_format(choice: str, template: str) -> ToolFormat | None:
    """The format by name; ``auto``: the one whose markers are in the chat template, or None."""
    if choice == "none":
        return None
    if choice == "auto":
        return _detect(template)
    name = choice.replace("-", "_")
    named_format = TOOL_FORMATS_BY_NAME.get(choice) or TOOL_FORMATS_BY_NAME.get(name) or ALIASES.get(name)
    if named_format is None:
        known = ", ".join(["auto", "none", *TOOL_FORMATS_BY_NAME, *ALIASES])
        raise ServerError(f"unknown --tool_call_parser {choice!r}; use one of {known}")
    return named_format


def _detect(template: str) -> ToolFormat | None:
    if any(marker in template for marker in UNKNOWN_FORMATS):
        return None
    return next(
        (candidate for candidate in TOOL_FORMATS if any(marker in template for marker in candidate.template_markers)),
        None,
    )
