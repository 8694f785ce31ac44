"""LoRA adapters with several engines: the text of one engine, loads and unloads in all, and engines that die."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmark.make_adapters import target_sizes, write_adapter
from benchmark.models import TINY, save_model
from lightserve.links.keys import generate
from test.api.server import STOP_S, ServerProcess, running_server, start_server
from test.api.test_dp import BACK_S, get
from test.api.test_engines import CLI, serving
from test.api.test_lora import FLAGS, PROMPTS, complete, texts_of
from test.ports import free_port
from test.waiting import wait_until

pytestmark = pytest.mark.slow

NAMES = [f"a{number}" for number in range(6)]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PLACES = ("--max_loras", "2", "--max_cpu_loras", "6")


class Adapters(NamedTuple):
    model: Path
    folder: Path
    expected: dict[str, list[str]]  # texts of both prompts by adapter; "": the base model


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    root = tmp_path_factory.mktemp("lora")
    model, folder = root / "model", root / "adapters"
    model.mkdir()
    save_model(model, None, TINY)
    sizes = target_sizes(str(model))
    for number, name in enumerate(NAMES):
        write_adapter(folder / name, sizes, rank=4, seed=number)
    return Adapters(model, folder, texts_of(model, folder, NAMES))


@pytest.fixture(scope="module")
def two(adapters: Adapters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("two") / "log"
    flags = ("--model_dir", str(adapters.model), *FLAGS, "--lora_dir", str(adapters.folder), *PLACES)
    with running_server(log, *flags, "--model_name", "base", "--dp", "2") as server:
        wait_until(lambda: serving(server) == 2, BACK_S)
        yield server


def wrong_answers(server: ServerProcess, adapters: Adapters, times: int = 4) -> list[Any]:
    """Requests of all adapters at once, and of the base model."""

    def ask(number: int) -> Any:
        name, which = ["", *NAMES][number % (len(NAMES) + 1)], number % 2
        answer = complete(server, name or "base", PROMPTS[which])
        return None if answer == (200, adapters.expected[name][which]) else (name, answer)

    with ThreadPoolExecutor(8) as threads:
        return [one for one in threads.map(ask, range(times * (len(NAMES) + 1))) if one is not None]


def test_two_engines_give_the_text_of_one_also_if_one_dies(two: ServerProcess, adapters: Adapters) -> None:
    assert wrong_answers(two, adapters) == []
    assert complete(two, "nobody", PROMPTS[0])[0] == 404

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(wrong_answers, two, adapters, 20)
        two.processes()["ls-router"][0].send_signal(signal.SIGKILL)

        assert asked.result() == []

    wait_until(lambda: serving(two) == 2, BACK_S)


def test_an_adapter_that_an_operator_loads_is_in_all_engines_also_in_one_that_is_replaced(
    two: ServerProcess, adapters: Adapters
) -> None:
    wait_until(lambda: serving(two) == 2, BACK_S)
    expected = adapters.expected["a3"]
    assert two.post(LOAD, {"lora_name": "mine", "lora_path": "a3"})[0] == 200
    assert {complete(two, "mine", PROMPTS[0]) for _ in range(6)} == {(200, expected[0])}
    assert "mine" in {card["id"] for card in get(two, "/v1/models")["data"]}

    for name in ("ls-router", "ls-router-1"):
        two.processes()[name][0].send_signal(signal.SIGKILL)
        wait_until(lambda: serving(two) == 1, BACK_S)
        wait_until(lambda: serving(two) == 2, BACK_S)
    assert {complete(two, "mine", PROMPTS[1]) for _ in range(6)} == {(200, expected[1])}

    assert two.post(UNLOAD, {"lora_name": "mine"})[0] == 200
    assert complete(two, "mine", PROMPTS[0])[0] == 404
    assert two.post(UNLOAD, {"lora_name": "mine"})[0] == 404
    assert two.post(LOAD, {"lora_name": "bad", "lora_path": "nothing"})[0] == 400


@pytest.mark.long
def test_a_gateway_serves_the_adapters_of_its_engines_with_roles_too(adapters: Adapters, tmp_path: Path) -> None:
    generate(tmp_path / "keys")
    keys = ("--cluster_keys", str(tmp_path / "keys"))
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    flags = (*FLAGS, "--lora_dir", str(adapters.folder), *PLACES, *keys)
    with ExitStack() as exits:
        for role, address in zip(("prefill", "decode"), addresses, strict=True):
            line = [*CLI, "engine", str(adapters.model), *flags, "--listen", address, "--role", role]
            engine = start_server(tmp_path / f"{role}.log", line)
            exits.callback(engine.process.wait, STOP_S)
            exits.callback(engine.process.kill)
        served = ("--model_dir", str(adapters.model), "--model_name", "base", "--engines", *addresses, *keys)
        gateway = exits.enter_context(running_server(tmp_path / "gateway.log", *served))
        wait_until(lambda: serving(gateway) == 2, BACK_S)

        assert wrong_answers(gateway, adapters) == []
