"""A trainer at a gateway: engines of other machines get its weights, and one that is replaced serves no older ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lightserve.links.keys import generate
from lightserve.offline.llm import LLM
from test.api.server import STOP_S, ServerProcess, running_server, start_server
from test.api.test_dp import BACK_S
from test.api.test_engines import CLI, serving
from test.api.test_rl_dp import get
from test.ports import free_port
from test.rl_checkpoints import save_checkpoints
from test.rl_trainer import Trainer
from test.waiting import wait_until

pytestmark = pytest.mark.slow

NAMES = ("first", "second", "third")
MODEL = {"device": "cpu", "max_total_token_num": 2048, "max_req_total_len": 1024}
PROMPT = [5, 17, 3, 99, 42]
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}


class Cluster:
    """Two engines with the weights "first", and a gateway that takes turns."""

    def __init__(self, folder: Path, exits: ExitStack) -> None:
        self.folders = save_checkpoints(folder, NAMES)
        for number in range(2):
            for name in NAMES:
                shutil.copytree(folder / name, self.weights_dir(folder, number) / name)
        generate(folder / "keys")
        self._folder, self._exits = folder, exits
        self._keys = ("--cluster_keys", str(folder / "keys"))
        self._addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        self.engines = [self._start(number) for number in range(2)]
        first = str(self.folders["first"])
        flags = ("--model_dir", first, "--engines", *self._addresses, "--cluster_policy", "round_robin", "--enable_rl")
        self.gateway = exits.enter_context(running_server(folder / "gateway.log", *flags, *self._keys))
        self.wait_until_serving(2)

    @staticmethod
    def weights_dir(folder: Path, number: int) -> Path:
        """Each engine is on a machine of its own."""
        return folder / f"engine-{number}"

    def _start(self, number: int) -> ServerProcess:
        flags = [text for name, value in MODEL.items() for text in (f"--{name}", str(value))]
        trained = ("--enable_rl", "--weights_dir", str(self.weights_dir(self._folder, number)))
        listen = ("--listen", self._addresses[number], *self._keys)
        command = [*CLI, "engine", str(self.folders["first"]), *flags, *trained, *listen]
        engine = start_server(self._folder / f"engine-{number}.log", command)
        self._exits.callback(engine.process.wait, STOP_S)
        self._exits.callback(engine.process.kill)
        return engine

    def replace(self, number: int) -> None:
        """Kill an engine, and start it again with the weights of its files."""
        self.kill(number)
        self.wait_until_serving(1)
        self.start(number)

    def kill(self, number: int) -> None:
        self.engines[number].process.kill()
        self.engines[number].process.wait(STOP_S)

    def start(self, number: int) -> None:
        self.engines[number] = self._start(number)

    def updates_begun(self) -> list[int]:
        return [engine.log.count("a weight update has begun") for engine in self.engines]

    @contextmanager
    def hidden(self, number: int, name: str) -> Iterator[None]:
        """A folder is not on the machine of an engine."""
        folder = self.weights_dir(self._folder, number) / name
        folder.rename(hidden := folder.with_name("hidden"))
        yield
        hidden.rename(folder)

    def wait_until_serving(self, count: int) -> None:
        wait_until(lambda: serving(self.gateway) == count, BACK_S)

    def load(self, name: str) -> None:
        status, reply = self.gateway.post("/update_weights_from_disk", {"model_path": name, "weight_version": name})
        assert (status, reply["success"]) == (200, True), reply

    def texts(self) -> list[list[int]]:
        """Of as many requests as each engine gets some of."""
        replies = [self.gateway.post("/v1/completions", BODY) for _ in range(4)]
        return [reply["choices"][0]["token_ids"] for _, reply in replies]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as exits:
        yield Cluster(tmp_path_factory.mktemp("gateway"), exits)


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> dict[str, list[int]]:
    """What fresh models generate."""
    texts = {}
    for name, folder in cluster.folders.items():
        options: dict[str, Any] = MODEL
        (result,) = LLM(str(folder), **options).generate([PROMPT], max_new_tokens=8, temperature=0.0)
        texts[name] = result.token_ids
    assert len({tuple(ids) for ids in texts.values()}) == len(NAMES)
    return texts


def test_an_engine_that_is_replaced_loads_the_folder_that_the_others_serve(
    cluster: Cluster, expected: dict[str, list[int]]
) -> None:
    assert cluster.texts() == [expected["first"]] * 4
    assert get(cluster.gateway, "/get_world_size") == {"world_size": 2}
    assert get(cluster.gateway, "/get_world_size?include_dp=false") == {"world_size": 1}
    cluster.load("second")
    assert cluster.texts() == [expected["second"]] * 4

    cluster.replace(1)
    assert cluster.texts() == [expected["second"]] * 4
    cluster.wait_until_serving(2)

    assert cluster.texts() == [expected["second"]] * 4
    assert get(cluster.gateway, "/get_weight_version")["weight_version"] == "second"


def test_an_engine_that_is_replaced_after_a_broadcast_serves_nothing_until_it_has_the_weights(
    cluster: Cluster, expected: dict[str, list[int]]
) -> None:
    trainer = Trainer(cluster.gateway.url, "", free_port(), "sglang", world_size=3)
    assert trainer.join()["success"]
    replies = trainer.update(load_file(cluster.folders["third"] / "model.safetensors"), "third")
    assert all(reply["success"] for reply in replies), replies
    assert cluster.texts() == [expected["third"]] * 4

    cluster.replace(0)
    wait_until(lambda: "engine 0 serves nothing" in cluster.gateway.log, BACK_S)

    assert serving(cluster.gateway) == 1
    assert cluster.texts() == [expected["third"]] * 4
    cluster.load("first")
    cluster.wait_until_serving(2)
    assert cluster.texts() == [expected["first"]] * 4
    trainer.close()


def test_weights_that_an_engine_lacks_are_served_by_the_others_alone(
    cluster: Cluster, expected: dict[str, list[int]]
) -> None:
    cluster.load("first")

    with cluster.hidden(1, "second"):
        status, reply = cluster.gateway.post("/update_weights_from_disk", {"model_path": "second"})

    assert (status, reply["success"]) == (400, False)
    assert reply["message"].startswith("engine 1: ")
    assert cluster.texts() == [expected["second"]] * 4
    assert "weights_lost: engine 1" in get(cluster.gateway, "/get_weight_version")["problem"]
    cluster.load("third")
    cluster.wait_until_serving(2)
    assert cluster.texts() == [expected["third"]] * 4


@pytest.mark.long
def test_an_engine_that_is_killed_in_an_update_is_named_and_no_text_is_of_old_weights(
    cluster: Cluster, expected: dict[str, list[int]]
) -> None:
    cluster.load("first")
    tensors = load_file(cluster.folders["second"] / "model.safetensors")
    port = free_port()
    trainer = Trainer(cluster.gateway.url, "", port, "sglang", world_size=3)
    group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3, "timeout_s": 20}
    group |= {"group_name": "trainer", "backend": "gloo"}
    assert trainer.beside("/init_weights_update_group", group, trainer.open_group)["success"]
    path, updates = "/update_weights_from_distributed", cluster.updates_begun()

    with ThreadPoolExecutor(1) as clients:  # the trainer sends nothing
        update = clients.submit(cluster.gateway.post, path, trainer.announced(tensors))
        wait_until(lambda: cluster.updates_begun() == [count + 1 for count in updates])
        cluster.kill(1)
        trainer.close()
        status, reply = update.result()

    assert (status, reply["success"]) == (400, False)
    assert "engine 1: it was lost before it replied" in reply["message"]
    assert "engine 0: model worker 0: " in reply["message"]
    assert not cluster.gateway.is_healthy()
    cluster.start(1)
    cluster.load("third")
    cluster.wait_until_serving(2)
    assert cluster.texts() == [expected["third"]] * 4


def test_an_engine_that_is_replaced_while_the_others_sleep_sleeps_too(
    cluster: Cluster, expected: dict[str, list[int]]
) -> None:
    cluster.load("first")
    assert cluster.gateway.post("/release_kv_cache_memory", {})[0] == 200
    cluster.kill(1)
    cluster.start(1)
    cluster.engines[1].wait_for_log("generation is paused")

    assert cluster.gateway.post("/wake_up", {})[1]["method"] == "kv_freed"

    cluster.wait_until_serving(2)
    assert cluster.texts() == [expected["first"]] * 4
