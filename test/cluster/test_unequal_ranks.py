"""A prefill and a decode engine with different --tp behind a gateway: the text of one rank, whichever worker dies."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from lightserve.links.keys import generate
from lightserve.offline.llm import LLM
from test.api.server import ServerProcess, running_server, start_server
from test.api.test_disaggregation import end, prompt
from test.api.test_dp import BACK_S
from test.api.test_engines import CLI, serving
from test.api.test_restart import clients_of
from test.models.architectures.case import build
from test.models.architectures.cases import CASES
from test.ports import free_port
from test.small_text import save_small_model, small_backend
from test.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.tp]

OPTIONS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
TOKENS = 40
POOL = ("--device", "cpu", "--dtype", "float32", "--max_total_token_num", "8192", "--batch_max_tokens", "256")


def heads(folder: Path) -> tuple[str, str]:
    return save_small_model(folder, context_len=2048), "none"


def latents(folder: Path) -> tuple[str, str]:
    hf = build(CASES["deepseek_v2"]).hf
    hf.config.max_position_embeddings = 2048
    hf.save_pretrained(folder)
    small_backend().save(str(folder / "tokenizer.json"))
    return str(folder), "fp8"


class Engines(NamedTuple):
    gateway: ServerProcess
    prefill: ServerProcess
    decode: ServerProcess


@contextmanager
def engines_of(model: str, kv_dtype: str, tps: tuple[int, int], folder: Path) -> Iterator[Engines]:
    """``tps``: of the prefill engine, of the decode engine."""
    generate(folder / "keys")
    keys = ("--cluster_keys", str(folder / "keys"))
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in tps]
    kv = ("--kv_listen", f"unix://{folder}/kv")
    started = []
    with ExitStack() as running:
        for address, tp, role in zip(addresses, tps, (("prefill",), ("decode", *kv)), strict=True):
            flags = ("--listen", address, *keys, "--tp", str(tp), "--kv_dtype", kv_dtype, *POOL, "--role", *role)
            started.append(start_server(folder / f"{role[0]}.log", [*CLI, "engine", model, *flags]))
            running.callback(end, started[-1])
        flags = ("--engines", ",".join(addresses), *keys, "--min_remote_prefill_tokens", "128")
        gateway = running.enter_context(running_server(folder / "log", "--model_dir", model, *flags))
        wait_until(lambda: serving(gateway) == 2, BACK_S)
        yield Engines(gateway, *started)


def worker_of(engine: ServerProcess) -> psutil.Process:
    """Of its last rank."""
    names = sorted(name for name in engine.processes() if name.startswith("ls-worker"))
    return engine.processes()[names[-1]][-1]


@pytest.mark.parametrize(
    "tps",
    [(1, 2), pytest.param((2, 1), marks=pytest.mark.long)],  # test_rank_heads.py has all pairs without servers
    ids=str,
)
@pytest.mark.parametrize("make_model", [heads, pytest.param(latents, marks=pytest.mark.long)])
def test_engines_with_other_ranks_give_the_text_of_one(
    tmp_path: Path, make_model: Callable[[Path], tuple[str, str]], tps: tuple[int, int]
) -> None:
    model, kv_dtype = make_model(tmp_path)
    prompts = [prompt(0, number) for number in range(4)]
    alone = LLM(model, device="cpu", data_type="float32", max_total_token_num=4096, kv_dtype=kv_dtype)
    texts = [one.text for one in alone.generate(prompts, max_new_tokens=TOKENS, **OPTIONS)]
    with engines_of(model, kv_dtype, tps, tmp_path) as (gateway, prefill, decode), clients_of(gateway) as clients:

        def ask(salt: str) -> list[Any]:
            body = {"max_tokens": TOKENS, "stream": True, "cache_salt": salt, **OPTIONS}
            return clients.ask([body | {"prompt": ids} for ids in prompts])

        def texts_of(asked: list[Any]) -> list[str]:
            return [answer.result()[0]["text"] for answer in asked]

        assert texts_of(ask("first")) == texts
        metrics = gateway.settled_metrics()
        assert metrics["kv_transfer_given_up_tokens_total"] == 0
        assert metrics["kv_transfer_received_tokens_total"] >= len(prompts) * 512

        worker_of(prefill).send_signal(signal.SIGSTOP)
        asked = ask("prefill dies")
        waited = metrics["kv_transfer_waited_tokens_total"]
        wait_until(lambda: gateway.metrics()["kv_transfer_waited_tokens_total"] > waited)
        worker_of(prefill).kill()
        assert texts_of(asked) == texts
        wait_until(lambda: serving(gateway) == 2, BACK_S)

        before = clients.events
        asked = ask("decode dies")
        wait_until(lambda: clients.events > before)
        worker_of(decode).kill()
        assert texts_of(asked) == texts
