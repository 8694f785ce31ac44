"""A server whose outputs a test writes, for clients and agents that need a model which calls tools.

    with scripted_server(tmp_path) as engine:
        engine.will_write('<tool_call>\\n{"name": "read", "arguments": {"path": "a"}}\\n</tool_call>', "Done.")
        client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none")

To use it by hand: ``LIGHTSERVE_TEST_SCRIPT=FOLDER python -m test.api.scripted [FLAGS]``, and append lines such as
{"text": "Hello."} to FOLDER/script.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightserve.server.api_server import main
from lightserve.server.process_group import Modules
from test.api.scripted_worker import FOLDER
from test.api.server import ServerProcess, running_server
from test.real_model import smollm2_tokenizer

MODEL_NAME = "scripted"
# ChatML with the tool calls of Hermes and the reasoning of Qwen3
CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif -%}
Call a tool as <tool_call>{"name": ..., "arguments": ...}</tool_call>. Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor -%}
<|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if not (loop.first and message.role == 'system') -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


@dataclass
class ScriptedEngine:
    server: ServerProcess
    script: Path

    @property
    def url(self) -> str:
        return self.server.url

    def will_write(self, *texts: str, when: str = "", step_s: float = 0.0) -> None:
        """Add outputs for the next requests, in order; with ``when``, for prompts that match this expression.

        ``step_s`` is the time of each step.
        """
        with self.script.open("a") as script:
            for text in texts:
                script.write(json.dumps({"text": text, "when": when, "step_s": step_s}) + "\n")


@contextmanager
def scripted_server(folder: Path, *flags: str) -> Iterator[ScriptedEngine]:
    """A server with the scripted engine on a free port. Further flags win over the ones set here."""
    with running_server(
        folder / "log", *flags, program=("-m", "test.api.scripted"), env={FOLDER: str(folder)}
    ) as server:
        yield ScriptedEngine(server, folder / "script")


def write_model(folder: Path) -> None:
    """A model folder with a tokenizer and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    (folder / "tokenizer.json").write_text(smollm2_tokenizer().to_json())
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special | {"chat_template": CHAT_TEMPLATE}))


def run_server(folder: Path, flags: list[str]) -> int:
    write_model(folder / "model")
    (folder / "script").touch()
    flags = ["--null_worker", "--model_dir", str(folder / "model"), "--model_name", MODEL_NAME, *flags]
    return main(flags, modules=Modules(null_worker="test.api.scripted_worker"))


if __name__ == "__main__":
    sys.exit(run_server(Path(os.environ[FOLDER]), sys.argv[1:]))
