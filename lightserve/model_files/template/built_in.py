"""Chat templates of models whose files have none, though their processor makes prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# as PaliGemmaProcessor: the images, the token that begins a text, the text, and a new line
_PALIGEMMA = (
    "{%- if messages | rejectattr('role', 'equalto', 'system') | list | length > 1 -%}"
    "{{ raise_exception('PaliGemma takes one message') }}{%- endif -%}"
    "{%- for message in messages if message.content is not string -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<image>{%- endif -%}{%- endfor -%}{%- endfor -%}"
    "{{- bos_token -}}"
    "{%- for message in messages -%}{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    "{%- for part in message.content -%}{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}{%- endfor -%}{{- '\\n' -}}"
)
_BY_TYPE = {"paligemma": _PALIGEMMA}


def built_in_templates(hf: Mapping[str, Any]) -> dict[str, str]:
    """By name, as ``ModelSource.chat_templates``."""
    text = _BY_TYPE.get(str(hf.get("multimodal_type")))
    return {} if text is None else {"default": text}
