"""Writes docs/combinations.md: the pairs of features that a server refuses, from the table.

python -m test.config.combinations_page
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from lightserve.config.combinations import TABLE, Conflict, Feature

PAGE = Path(__file__).parent.parent.parent / "docs" / "combinations.md"
# of features that are not a flag with their name
TITLES = {
    "drafted_states": "`--speculative_config` with a model that has recurrent layers",
    "attention_dp": "attention groups (`--attention_dp`, `--enable_dp_attention`)",
    "ranks": "`--tp` or `--pp`",
    "dummy": "`--load_format dummy`",
    "lora": "LoRA adapters (`--lora_modules`, `--lora_dir`)",
    "draft_head": "`--speculative_config` with a head",
    "gateway": "a gateway (`--engines`, `--engines_file`)",
    "roles": "prefill and decode roles (`--roles`, `--role`)",
    "engine_flag": "a flag of engines",
    "http_flag": "a flag of HTTP",
    "http_address": "`--host` or `--port`",
    "offline": "`LLM()`",
    "pooling": "a model that generates no text",
    "no_kv_cache": "a model without a KV cache",
    "kv_dtype": "a quantised KV cache (`--kv_dtype`)",
    "no_experts": "a model without experts",
    "no_windows": "a model without sliding windows",
    "no_states": "a model without recurrent layers",
    "transformers": "a model that transformers runs",
    "images": "images (`--limit_mm_per_prompt`)",
}
INTRODUCTION = """\
# What cannot be combined

Features combine, except for the pairs below. A server that gets such a pair says which one, why and
what to do, before it loads anything:

```
lightserve serve --model_dir DIR --kv_ram_gb 8 --disable_dynamic_prompt_cache
```

`python -m test.config.combinations_page` writes this page from the one table of such pairs,
[`combinations.py`](../lightserve/config/combinations.py). A test compares it, and starts or refuses
every pair of features.
"""


def page() -> str:
    missing = [row for row in TABLE if row.is_missing]
    lasting = [row for row in TABLE if not row.is_missing]
    return "\n".join(
        [
            INTRODUCTION,
            f"## Not built: {len(missing)}\n",
            *map(_entry, missing),
            f"\n## Contradictions: {len(lasting)}\n",
            "One of the two has nothing to do beside the other, or undoes it.\n",
            *map(_entry, lasting),
            "",
        ]
    )


def _entry(row: Conflict) -> str:
    text = f"- {_title(row.first)} with {_title(row.second)}: {_markdown(row.reason)}; {_markdown(row.remedy)}"
    return textwrap.fill(text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _title(feature: Feature) -> str:
    return TITLES.get(feature.name, f"`--{feature.name}`")


def _markdown(text: str) -> str:
    """With flags as code."""
    return re.sub(r"(?<![\w`])--[a-z]\w*", lambda found: f"`{found[0]}`", text)


if __name__ == "__main__":
    PAGE.write_text(page())
