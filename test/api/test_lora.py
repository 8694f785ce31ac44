"""LoRA adapters of a real server: many adapters in few places, loads and unloads, a killed worker, bad adapters."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmark.make_adapters import target_sizes, write_adapter
from benchmark.models import TINY, save_model
from lightserve.offline.llm import LLM
from test.api.server import ServerProcess, running_server
from test.api.test_restart import kill_worker
from test.held_adapter import held_load, write_held
from test.lora_files import write_adapter as write_random
from test.waiting import wait_until

pytestmark = pytest.mark.slow

ADAPTERS, PLACES, CLIENTS = 200, 8, 12
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [7, 7, 7])
TOKENS = 5
# rows have the same bits in any batch, so the expected text can be computed for one request at a time
FLAGS = ("--load_format", "dummy", "--deterministic", "--max_total_token_num", "4096", "--max_req_total_len", "256")


class Served(NamedTuple):
    server: ServerProcess
    folder: Path
    expected: dict[str, list[str]]  # texts of both prompts by adapter; "": the base model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("lora")
    model, folder = root / "model", root / "adapters"
    model.mkdir()
    save_model(model, None, TINY)
    sizes, names = target_sizes(str(model)), [f"a{number}" for number in range(ADAPTERS)]
    for number, name in enumerate(names):
        write_adapter(folder / name, sizes, rank=4, seed=number)
    expected = texts_of(model, folder, names)
    places = ("--lora_dir", str(folder), "--max_loras", str(PLACES), "--max_cpu_loras", "16")
    static = ("--lora_modules", f"first={folder / 'a0'}", "--model_name", "base")
    with running_server(root / "log", "--model_dir", str(model), *FLAGS, *places, *static) as server:
        yield Served(server, folder, expected)


def texts_of(model: Path, folder: Path, names: list[str]) -> dict[str, list[str]]:
    """Of each adapter alone."""
    llm = LLM(str(model), load_format="dummy", deterministic=True, max_loras=1, max_total_token_num=512)
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    return {
        name: [one.text for one in llm.generate([*PROMPTS], lora=str(folder / name) if name else None, **options)]
        for name in ["", *names]
    }


def complete(server: ServerProcess, model: str, prompt: list[int]) -> tuple[int, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    status, response = server.post("/v1/completions", body)
    return status, response["choices"][0]["text"] if status == 200 else response["error"]["message"]


def test_adapters_change_the_text(served: Served) -> None:
    assert len({tuple(texts) for texts in served.expected.values()}) > ADAPTERS * 0.8


def test_200_adapters_cycle_through_8_places_with_loads_unloads_and_a_killed_worker(served: Served) -> None:
    server, _, expected = served
    names = [*expected, *random.Random(1).choices(list(expected), k=100)]
    random.Random(2).shuffle(names)

    def ask(number: int) -> str | None:
        """What is wrong with a request."""
        name, which = names[number], number % 2
        if number == len(names) // 2:
            kill_worker(server)
        if number % 10 == 0:
            load = {"lora_name": f"own{number}", "lora_path": name or "a1"}
            assert server.post("/v1/load_lora_adapter", load)[0] == 200
            assert complete(server, f"own{number}", PROMPTS[which]) == (200, expected[name or "a1"][which])
            assert server.post("/v1/unload_lora_adapter", {"lora_name": f"own{number}"})[0] == 200
            assert complete(server, f"own{number}", PROMPTS[which])[0] == 404
        found = complete(server, name or "base", PROMPTS[which])
        return None if found == (200, expected[name][which]) else f"{name}: {found}, not {expected[name][which]}"

    with ThreadPoolExecutor(CLIENTS) as threads:
        wrong = [one for one in threads.map(ask, range(len(names))) if one is not None]

    assert wrong == []
    assert server.log.count("died (signal 9); restarting the workers") == 1


def test_no_step_waits_while_an_adapter_is_loaded(served: Served) -> None:
    """The load does not end before everything else is done, however long that takes."""
    server, folder, expected = served
    names = [f"a{number}" for number in range(40, 40 + PLACES + 1)]  # one more than the device holds
    for name in names:
        complete(server, name, PROMPTS[0])
    pipe = write_held(folder / "held")

    with ThreadPoolExecutor(2) as threads:
        held = threads.submit(complete, server, "held", PROMPTS[0])
        with held_load(pipe):
            queued = threads.submit(complete, server, "a60", PROMPTS[1])
            during = {name: complete(server, name or "base", PROMPTS[1]) for name in ["", *names]}
            is_held = not held.done() and not queued.done()

        assert during == {name: (200, expected[name][1]) for name in ["", *names]}  # copied to the device again
        assert is_held
        assert held.result()[0] == 400
        assert queued.result() == (200, expected["a60"][1])


def test_adapters_are_models_with_a_parent(served: Served) -> None:
    complete(served.server, "a7", PROMPTS[0])

    with urllib.request.urlopen(f"{served.server.url}/v1/models") as response:
        cards = {card["id"]: card for card in json.load(response)["data"]}

    assert (cards["base"]["parent"], cards["first"]["parent"], cards["a7"]["parent"]) == (None, "base", "base")
    assert (cards["first"]["root"], cards["a7"]["root"]) == ("a0", "a7")  # no paths of the machine
    assert served.server.post("/tokenize", {"model": "a8", "prompt": "x"})[0] == 200
    assert served.server.post("/tokenize", {"model": "nope", "prompt": "x"})[0] == 404


@pytest.mark.parametrize("model", ["first", "base:first", "a0", "base:a0"])
def test_an_adapter_has_several_names(served: Served, model: str) -> None:
    assert complete(served.server, model, PROMPTS[0]) == (200, served.expected["a0"][0])


def test_an_adapter_that_is_replaced_does_not_use_cached_prefixes_of_the_old_one(served: Served) -> None:
    server, _, expected = served
    for name in ("a20", "a21"):
        body = {"lora_name": "replaced", "lora_path": name, "load_inplace": True}
        assert server.post("/v1/load_lora_adapter", body)[0] == 200
        for which in (0, 1, 0):
            assert complete(server, "replaced", PROMPTS[which]) == (200, expected[name][which])
    assert server.post("/v1/load_lora_adapter", body | {"load_inplace": False})[0] == 400


def test_tgi_names_an_adapter_by_adapter_id(served: Served) -> None:
    texts = []
    for adapter in ({"adapter_id": "a3"}, {}):
        parameters = {"max_new_tokens": TOKENS, "details": False, **adapter}
        status, response = served.server.post("/generate", {"inputs": "the", "parameters": parameters})
        assert status == 200
        texts.append(str(response))

    assert texts[0] != texts[1]
    assert served.server.post("/generate", {"inputs": "the", "parameters": {"adapter_id": "nope"}})[0] == 404


def test_a_bad_adapter_gets_one_clear_error_and_the_rest_goes_on(served: Served) -> None:
    server, folder, expected = served
    sizes = {"model.layers.0.self_attn.q_proj": (64, 64)}
    write_random(folder / "bad_rank", sizes, rank=32)
    write_random(folder / "bad_shape", {"model.layers.0.self_attn.q_proj": (64, 32)})
    write_random(folder / "bad_module", {"model.layers.9.self_attn.q_proj": (64, 64)})
    write_random(folder / "bad_missing", sizes, target_modules=["q_proj", "v_proj"])
    write_random(folder / "bad_dora", sizes, use_dora=True)
    file = write_random(folder / "bad_truncated", sizes) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    (folder / "bad_link").symlink_to(write_random(folder.parent / "outside", sizes))
    reasons = {
        "bad_rank": (400, "has rank 32; the limit is 16 (--max_lora_rank)"),
        "bad_shape": (400, "linear of 32 inputs and 64 outputs; the model's has 64 and 64"),
        "bad_module": (400, "is not in this model"),
        "bad_missing": (400, "targets v_proj, but lacks"),
        "bad_dora": (400, "DoRA adapters are not supported"),
        "bad_truncated": (400, "truncated or damaged"),
        "bad_link": (404, "does not exist"),
        "../outside": (404, "does not exist"),
        "/etc": (404, "does not exist"),
    }

    for name, (status, reason) in reasons.items():
        found = complete(server, name, PROMPTS[0])
        assert found[0] == status, (name, found)
        assert reason in found[1]
        assert "\n" not in found[1]
        loaded = server.post("/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": name})
        assert loaded[0] == 400, (name, loaded)
        assert str(folder.parent) not in f"{found}{loaded}"
        assert status == 404 or f"{folder / name}" in server.log
    assert complete(server, "bad", PROMPTS[0])[0] == 404
    assert complete(server, "a5", PROMPTS[0]) == (200, expected["a5"][0])


def test_an_adapter_whose_files_change_must_be_loaded_again(served: Served) -> None:
    server, folder, expected = served
    write_adapter(folder / "changing", target_sizes(str(folder.parent / "model")), rank=4, seed=30)
    assert complete(server, "changing", PROMPTS[0]) == (200, expected["a30"][0])

    write_adapter(folder / "changing", target_sizes(str(folder.parent / "model")), rank=4, seed=31)
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "changing"})[0] == 200

    assert complete(server, "changing", PROMPTS[0]) == (200, expected["a31"][0])


def test_adapters_are_there_again_after_a_restart_without_requests(served: Served) -> None:
    server, _, expected = served
    restarts = server.log.count("a new model worker is ready")

    kill_worker(server)
    wait_until(lambda: server.log.count("a new model worker is ready") > restarts)

    assert complete(server, "first", PROMPTS[0]) == (200, expected["a0"][0])


def test_a_wrong_adapter_ends_the_start_with_one_line(tmp_path: Path) -> None:
    save_model(tmp_path, None, TINY)
    folder = write_random(tmp_path / "a", {"model.layers.0.self_attn.q_proj": (64, 32)})
    log = tmp_path / "log"

    with (
        pytest.raises(AssertionError),
        running_server(log, "--model_dir", str(tmp_path), *FLAGS, "--lora_modules", f"a={folder}"),
    ):
        pass

    last = log.read_text().strip().splitlines()[-1]
    assert "the model's has 64 and 64; use the model that it was trained on (see docs/lora.md)" in last
    assert "Traceback" not in log.read_text()
