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
# as Qwen2AudioProcessor: each sound has its number in the chat
_QWEN2_AUDIO = (
    "{%- set sounds = namespace(count=0) -%}{%- for message in messages -%}"
    "{%- if loop.first and message.role != 'system' -%}"
    "{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' -}}{%- endif -%}"
    "{{- '<|im_start|>' + message.role + '\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'audio' -%}{%- set sounds.count = sounds.count + 1 -%}"
    "{{- 'Audio ' ~ sounds.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\n' -}}"
    "{%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
_BY_TYPE = {"paligemma": _PALIGEMMA, "qwen2_audio": _QWEN2_AUDIO}


def built_in_templates(hf: Mapping[str, Any]) -> dict[str, str]:
    """By name, as ``ModelSource.chat_templates``."""
    text = _BY_TYPE.get(str(hf.get("multimodal_type")))
    return {} if text is None else {"default": text}
