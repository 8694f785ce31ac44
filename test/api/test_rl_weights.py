"""Weight updates of a real server with a tiny model: from a folder, and from a trainer in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightserve.offline.llm import LLM
from test.api.server import ServerProcess, running_server
from test.pooling.files import word_tokenizer
from test.ports import free_port
from test.rl_checkpoints import save_checkpoints
from test.rl_trainer import Trainer
from test.waiting import wait_until

pytestmark = pytest.mark.slow

KEY = "for-trainers"
MODEL = ("--device", "cpu", "--data_type", "bfloat16", "--max_total_token_num", "2048", "--max_req_total_len", "1024")
FLAGS = (*MODEL, "--enable_rl", "--admin_key", KEY)
PROMPT = [5, 17, 3, 99, 42]
BODY = {"prompt": [PROMPT], "max_tokens": 8, "temperature": 0, "logprobs": 0, "return_token_ids": True}
NAMES = ("first", "second", "third")
NORM = "model.norm.weight"
PINNED = " ".join(f"w{number}" for number in range(2, 90))


class Text(NamedTuple):
    ids: list[int]
    logprobs: list[float]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of one model."""
    folders = save_checkpoints(tmp_path_factory.mktemp("weights"), NAMES)
    word_tokenizer().save(str(folders["first"] / "tokenizer.json"))
    (folders["first"] / "prompts.json").write_text(json.dumps({"pinned": PINNED}))
    return folders


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Text]:
    """What fresh models generate."""
    texts = {}
    for name, folder in folders.items():
        llm = LLM(str(folder), device="cpu", data_type="bfloat16", max_total_token_num=2048, max_req_total_len=1024)
        (result,) = llm.generate([PROMPT], max_new_tokens=8, temperature=0.0, logprobs=0)
        texts[name] = Text(result.token_ids, result.logprobs)
    assert len({tuple(text.ids) for text in texts.values()}) == len(NAMES)
    return texts


def serving(folders: dict[str, Path], log: Path, *flags: str) -> AbstractContextManager[ServerProcess]:
    first = folders["first"]
    return running_server(log, "--model_dir", str(first), "--weights_dir", str(first.parent), *FLAGS, *flags)


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    pinned = ("--pinned_prefixes", str(folders["first"] / "prompts.json"))
    with serving(folders, tmp_path_factory.mktemp("log") / "log", *pinned) as server:
        yield server


def post(server: ServerProcess, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    return server.post(path, body or {}, Authorization=f"Bearer {KEY}")


def get(server: ServerProcess, path: str) -> Any:
    request = urllib.request.Request(server.url + path, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def generated(server: ServerProcess) -> Text:
    status, reply = post(server, "/v1/completions", BODY)
    assert status == 200, reply
    (choice,) = reply["choices"]
    return Text(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def assert_serves(server: ServerProcess, text: Text) -> None:
    found = generated(server)
    assert found.ids == text.ids
    assert found.logprobs == pytest.approx(text.logprobs, abs=1e-4)


def load_first(server: ServerProcess) -> None:
    status, reply = post(server, "/update_weights_from_disk", {"model_path": "first", "weight_version": "first"})
    assert (status, reply["success"]) == (200, True), reply


def run_trainer(server: ServerProcess, api: str, *folders: Path, world_size: int = 2) -> list[Any]:
    """The replies to its join, and to each of its updates."""
    arguments = [server.url, KEY, str(free_port()), api, str(world_size), *map(str, folders)]
    command = [sys.executable, "-m", "test.rl_trainer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + server.log
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def trainer(server: ServerProcess) -> Iterator[Trainer]:
    trainer = Trainer(server.url, KEY, free_port(), "sglang")
    assert trainer.join()["success"]
    yield trainer
    trainer.post("/destroy_weights_update_group", {"group_name": "trainer"})
    trainer.close()


def test_weights_from_a_folder_are_those_of_a_fresh_server(server: ServerProcess, expected: dict[str, Text]) -> None:
    load_first(server)
    assert_serves(server, expected["first"])

    status, reply = post(server, "/update_weights_from_disk", {"model_path": "second", "weight_version": "v2"})

    assert (status, reply["success"]) == (200, True), reply
    assert_serves(server, expected["second"])
    assert get(server, "/get_weight_version")["weight_version"] == "v2"


@pytest.mark.parametrize("api", ["sglang", "bucket", "vllm", "packed"])
def test_weights_of_a_trainer_are_those_of_a_fresh_server(
    server: ServerProcess, folders: dict[str, Path], expected: dict[str, Text], api: str
) -> None:
    load_first(server)

    joined, *updates = run_trainer(server, api, folders["second"], folders["third"])

    assert joined[0].get("success") or joined[0]["message"] == "Weight transfer initialized", joined
    replies = [reply for update in updates for reply in update]
    assert not [reply for reply in replies if "error" in reply or reply.get("success") is False], replies
    assert_serves(server, expected["third"])
    assert get(server, "/weight_info")["weight_version"] == "third"


def test_a_stream_over_an_update_is_whole_and_says_which_weights_it_had(
    server: ServerProcess, trainer: Trainer, folders: dict[str, Path]
) -> None:
    load_first(server)
    body = BODY | {"max_tokens": 900, "ignore_eos": True, "return_weight_versions": True, "stream": True}
    stream = urllib.request.urlopen(
        urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
    )
    events = _events(stream)
    first = next(events)

    assert post(server, "/pause?mode=keep", {})[0] == 200
    replies = trainer.update(load_file(folders["second"] / "model.safetensors"), "second")
    assert all(reply["success"] for reply in replies), replies
    assert post(server, "/resume", {})[0] == 200

    choices = [event["choices"][0] for event in (first, *events) if event["choices"]]
    assert sum(len(choice["token_ids"]) for choice in choices) == 900
    spans = choices[-1]["weight_versions"]
    assert [span["version"] for span in spans] == ["first", "second"]
    assert (spans[0]["start"], spans[-1]["end"]) == (0, 900)
    assert 0 < spans[0]["end"] == spans[1]["start"] < 900


def _events(stream: Any) -> Iterator[Any]:
    for line in stream:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def test_the_prefix_cache_has_nothing_of_the_weights_before(server: ServerProcess, expected: dict[str, Text]) -> None:
    load_first(server)
    long = {"prompt": [PROMPT * 40], "max_tokens": 2, "temperature": 0}
    post(server, "/v1/completions", long)
    assert post(server, "/v1/completions", long)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    post(server, "/update_weights_from_disk", {"model_path": "second", "flush_cache": False})

    assert post(server, "/v1/completions", long)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert_serves(server, expected["second"])


def test_pinned_prefixes_are_computed_with_the_new_weights(server: ServerProcess, folders: dict[str, Path]) -> None:
    static = server.post("/tokenize", {"prompt": PINNED})[1]["tokens"]
    for name in ("second", "first"):
        post(server, "/update_weights_from_disk", {"model_path": name, "flush_cache": name == "first"})
        wait_until(lambda: server.metrics()["kv_pinned_tokens"] == len(static))
        body = BODY | {"disable_prompt_cache": True, "prompt": [static + PROMPT]}
        whole = post(server, "/v1/completions", body)[1]["choices"][0]

        named = post(server, "/v1/completions", BODY | {"task_id": "pinned"})[1]

        assert named["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(static)
        assert named["choices"][0]["token_ids"] == whole["token_ids"]
        assert named["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
            whole["logprobs"]["token_logprobs"], abs=1e-2
        )


def test_pinned_prefixes_come_back_when_the_memory_of_the_kv_does(server: ServerProcess) -> None:
    load_first(server)
    body = BODY | {"task_id": "pinned"}
    whole = post(server, "/v1/completions", body)[1]["choices"][0]["token_ids"]
    assert post(server, "/release_kv_cache_memory", {})[0] == 200
    assert post(server, "/wake_up?tags=kv_cache", {})[0] == 200

    wait_until(lambda: server.metrics()["kv_pinned_tokens"] > 0)

    assert post(server, "/v1/completions", body)[1]["choices"][0]["token_ids"] == whole


# refused before anything changes

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"names": ["model.norm.wieght"]}, "no place for 1 tensors: model.norm.wieght"),
    "a shape": ({"shapes": [[63]]}, r"has shape (63,), but config.json needs (64,)"),
    "a dtype": ({"dtypes": ["int8"]}, f"{NORM} is int8"),
    "an unknown dtype": ({"dtypes": ["bf17"]}, "the dtype 'bf17' is not known"),
    "lengths": ({"shapes": []}, "names has 1 entries, dtypes 1 and shapes 0"),
    "a group": ({"group_name": "other"}, "there is no weight update group 'other'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_tensors_that_do_not_fit_are_refused_and_change_nothing(
    server: ServerProcess, trainer: Trainer, expected: dict[str, Text], what: str
) -> None:
    load_first(server)
    fields, message = WRONG[what]
    announced = {"names": [NORM], "dtypes": ["bfloat16"], "shapes": [[64]], "group_name": "trainer"}

    reply = trainer.post("/update_weights_from_distributed", announced | fields)

    assert message in json.dumps(reply), reply
    assert reply["status"] == 400
    assert_serves(server, expected["first"])


def test_a_folder_that_does_not_fit_is_refused_and_changes_nothing(
    server: ServerProcess, folders: dict[str, Path], expected: dict[str, Text], tmp_path: Path
) -> None:
    load_first(server)
    root = folders["first"].parent
    tensors, config = load_file(folders["second"] / "model.safetensors"), (root / "second" / "config.json").read_text()
    wrong = {
        "missing": ({name: tensor for name, tensor in tensors.items() if name != NORM}, config, "lacks 1 tensors"),
        "shape": (tensors | {NORM: torch.ones(63).bfloat16()}, config, "has shape (63,)"),
        "theta": (tensors, json.dumps(json.loads(config) | {"rope_theta": 7.0}), "differs for layer 0 in rope"),
        "damaged": (tensors, config, "truncated"),
    }
    for name, (content, config_json, message) in wrong.items():
        folder = root / f"wrong-{name}"
        folder.mkdir(exist_ok=True)
        save_file(content, folder / "model.safetensors")
        (folder / "config.json").write_text(config_json)
        if name == "damaged":
            file = folder / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-100])

        status, reply = post(server, "/update_weights_from_disk", {"model_path": folder.name})

        assert (status, reply["success"]) == (400, False)
        assert message in reply["message"]
    (root / "link").symlink_to(tmp_path)
    for path in ("..", "/etc", "link", "absent"):
        status, reply = post(server, "/update_weights_from_disk", {"model_path": path})
        assert (status, f"below --weights_dir ({root})" in reply["message"]) == (400, True)
        assert reply["message"] in server.log
    assert_serves(server, expected["first"])


def test_pickled_tensors_are_refused(server: ServerProcess) -> None:
    status, reply = post(server, "/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]})

    assert status == 400
    assert "/update_weights_from_distributed" in reply["error"]["message"]


# failures after the first byte


def half(folder: Path) -> dict[str, Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return dict(list(tensors.items())[: len(tensors) // 2])


def assert_refuses(server: ServerProcess, reason: str) -> None:
    status, reply = post(server, "/v1/completions", BODY)
    assert status == 503, reply
    assert reason in reply["error"]["message"]
    wait_until(lambda: not server.is_healthy())
    assert reason in get(server, "/get_weight_version")["problem"]


def test_a_trainer_that_dies_in_a_broadcast_leaves_no_text_until_all_weights_came(
    server: ServerProcess, folders: dict[str, Path], expected: dict[str, Text]
) -> None:
    load_first(server)
    arguments = [server.url, KEY, str(free_port()), "dies", "2", str(folders["second"])]
    died = subprocess.run([sys.executable, "-m", "test.rl_trainer", *arguments], timeout=300, check=False)
    assert died.returncode == 9

    wait_until(lambda: get(server, "/get_weight_version")["problem"] is not None)
    assert_refuses(server, "the weight update has failed")

    run_trainer(server, "sglang", folders["third"])
    assert_serves(server, expected["third"])
    wait_until(server.is_healthy)


def test_generation_that_is_resumed_too_early_is_refused(
    server: ServerProcess, trainer: Trainer, folders: dict[str, Path], expected: dict[str, Text]
) -> None:
    load_first(server)
    post(server, "/pause_generation", {})
    part = half(folders["second"])
    reply = trainer.beside("/update_weights_from_distributed", trainer.announced(part), lambda: trainer.send_each(part))
    assert reply["success"]

    post(server, "/continue_generation", {})

    assert_refuses(server, "before all weights of the update had come")
    assert all(reply["success"] for reply in trainer.update(load_file(folders["third"] / "model.safetensors"), "third"))
    assert_serves(server, expected["third"])


def test_an_update_of_vllm_that_has_failed_cannot_be_finished(
    server: ServerProcess, folders: dict[str, Path], expected: dict[str, Text]
) -> None:
    load_first(server)
    trainer = Trainer(server.url, KEY, free_port(), "vllm")
    trainer.join()
    part = half(folders["second"])
    info = trainer.announced(part)
    update = {"names": info["names"], "dtype_names": info["dtypes"], "shapes": info["shapes"]}
    trainer.post("/start_weight_update", {})
    trainer.beside("/update_weights", {"update_info": update}, lambda: trainer.send_each(part))

    finished = trainer.post("/finish_weight_update", {})

    assert finished["status"] >= 400
    assert "lacks" in json.dumps(finished)
    assert_refuses(server, "the weight update has failed")
    assert trainer.post("/finish_weight_update", {})["status"] == 409
    load_first(server)
    assert_serves(server, expected["first"])
    trainer.post("/shutdown_weight_transfer_engine", {})
    trainer.close()


def kill_worker(server: ServerProcess) -> None:
    (worker,) = server.processes()["ls-worker"]
    restarts = server.metrics()["worker_restarts_total"]
    worker.send_signal(signal.SIGKILL)
    wait_until(lambda: server.metrics()["worker_restarts_total"] > restarts)


def test_a_worker_that_dies_comes_back_with_the_weights_of_the_last_folder(
    server: ServerProcess, expected: dict[str, Text]
) -> None:
    load_first(server)
    post(server, "/update_weights_from_disk", {"model_path": "second"})

    kill_worker(server)

    assert_serves(server, expected["second"])


def test_a_worker_that_dies_after_a_broadcast_does_not_serve_old_weights(
    server: ServerProcess, trainer: Trainer, folders: dict[str, Path], expected: dict[str, Text]
) -> None:
    load_first(server)
    trainer.update(load_file(folders["second"] / "model.safetensors"), "second")
    assert_serves(server, expected["second"])

    kill_worker(server)

    wait_until(lambda: get(server, "/get_weight_version")["problem"] is not None)
    assert_refuses(server, "weights_lost")
    run_trainer(server, "bucket", folders["third"])
    assert_serves(server, expected["third"])


def test_requests_wait_while_weights_come(
    server: ServerProcess, trainer: Trainer, folders: dict[str, Path], expected: dict[str, Text]
) -> None:
    load_first(server)
    part, texts = half(folders["second"]), []
    rest = {k: v for k, v in load_file(folders["second"] / "model.safetensors").items() if k not in part}
    path = "/update_weights_from_distributed"
    trainer.beside(path, trainer.announced(part), lambda: trainer.send_each(part))
    request = threading.Thread(target=lambda: texts.append(generated(server)))
    request.start()
    wait_until(lambda: server.metrics()["num_requests_waiting"] > 0)

    reply = trainer.beside(path, trainer.announced(rest), lambda: trainer.send_each(rest))

    assert reply["success"]
    request.join()
    assert texts[0].ids == expected["second"].ids


# other servers


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        (("--tp", "2"), 3),
        pytest.param(("--pp", "2"), 3, marks=pytest.mark.long),
        pytest.param(("--dp", "2"), 3, marks=pytest.mark.long),
        (("--quantization", "int8"), 2),
    ],
    ids=["tp", "pp", "dp", "int8"],
)
def test_every_rank_gets_its_part(
    folders: dict[str, Path], tmp_path: Path, flags: tuple[str, ...], world_size: int
) -> None:
    with serving(folders, tmp_path / "log", *flags) as server:
        before = generated(server)
        load_from_disk = {"model_path": "second", "weight_version": "second"}
        assert post(server, "/update_weights_from_disk", load_from_disk)[1]["success"]
        second = generated(server)
        assert second.ids != before.ids

        run_trainer(server, "sglang", folders["third"], world_size=world_size)
        assert generated(server).ids not in (before.ids, second.ids)
        run_trainer(server, "packed", folders["second"], world_size=world_size)

        assert generated(server).ids == second.ids


def test_the_endpoints_for_tokens_say_the_version(server: ServerProcess) -> None:
    load_first(server)

    _, sglang = post(server, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}})
    _, vllm = post(server, "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}})

    assert sglang["meta_info"]["weight_version"] == "first"
    assert vllm["choices"][0]["weight_versions"] == [{"version": "first", "start": 0, "end": 3}]
