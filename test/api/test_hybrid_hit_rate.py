"""A five-turn chat finds as much of its prompts in the prefix cache of a hybrid as in that of a plain transformer."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from test.api.server import ServerProcess, running_server
from test.api.test_prefix_cache import CHAT, COMPLETE, ask, cached
from test.hybrid_model import CONFIG, prompt, save_hybrid_model, text_of
from test.waiting import wait_until

pytestmark = pytest.mark.slow

TURNS = 5
ANSWER = 24  # tokens
# An answer begins with w3. A reasoning model writes w4 w5 behind it, which old turns lose: so a prompt does not end as
# the next one continues.
TEMPLATE = (
    "{% for message in messages %}w1 w{{ 2 + (message.role == 'assistant') }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}w1 w3{% if reasons %} w4 w5{% endif %}{% endif %}"
)
FLAGS = ("--device", "cpu", "--dtype", "float32", "--batch_max_tokens", "64", "--chat_template", TEMPLATE)
Servers = Callable[[str], ServerProcess]


def save_plain_model(folder: Path) -> str:
    """With the tokenizer of the hybrid."""
    save_hybrid_model(folder)
    torch.manual_seed(0)
    shape = {
        key: CONFIG[key] for key in CONFIG if key.startswith(("num_a", "num_k", "num_h", "hid", "int", "voc", "max"))
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **shape)).float().eval()
    for weight in model.state_dict().values():
        weight.normal_(std=0.15)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        running: dict[str, ServerProcess] = {}

        def server(kind: str) -> ServerProcess:
            if kind not in running:
                folder = tmp_path_factory.mktemp(kind)
                path = save_plain_model(folder) if kind == "plain" else save_hybrid_model(folder)[0]
                log = tmp_path_factory.mktemp("server") / "log"
                running[kind] = stack.enter_context(running_server(log, "--model_dir", path, *FLAGS))
            return running[kind]

        yield server


def hit_rate(server: ServerProcess, reasons: bool) -> float:
    """Of all prompt tokens of a chat, those from the second turn on included."""
    messages: list[dict[str, str]] = []
    hits, total = 0, 0
    for turn in range(TURNS):
        messages.append({"role": "user", "content": text_of(prompt(60, seed=turn))})

        response = ask(
            server,
            CHAT,
            messages=messages,
            chat_template_kwargs={"reasons": reasons},
            max_tokens=ANSWER,
            ignore_eos=True,
            cache_salt=f"reasons {reasons}",
        )

        hits, total = hits + cached(response["usage"]), total + response["usage"]["prompt_tokens"]
        messages.append({"role": "assistant", "content": response["choices"][0]["message"]["content"]})
    return hits / total


@pytest.mark.parametrize("reasons", [False, True], ids=["appending", "reasoning"])
def test_a_chat_of_five_turns_has_the_hit_rate_of_a_plain_transformer(reasons: bool, servers: Servers) -> None:
    plain, hybrid = (hit_rate(servers(kind), reasons) for kind in ("plain", "hybrid"))

    assert plain > 0.6
    assert hybrid >= plain - 0.02


@contextmanager
def long_stream(server: ServerProcess) -> Iterator[None]:
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    body = {"prompt": prompt(60, seed=99), "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
    connection.request("POST", COMPLETE, json.dumps(body), {"Content-Type": "application/json"})
    connection.getresponse().readline()
    yield
    connection.close()


def test_a_running_request_holds_one_row(servers: Servers) -> None:
    """Beside it, kept rows belong to cached prefixes, which give them back when rows are short."""
    server = servers("hybrid")

    with long_stream(server):
        wait_until(lambda: server.metrics()["num_requests_running"] == 1)
        wait_until(lambda: server.metrics()["kv_group_used_slots/state"] == 1)

    wait_until(lambda: server.metrics()["kv_group_used_slots/state"] == 0)
