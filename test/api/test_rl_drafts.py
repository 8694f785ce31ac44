"""Weight updates of draft heads through a real server: no text changes, and the server says what it has lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from test.api.server import ServerProcess, running_server
from test.api.test_rl_weights import BODY, KEY, MODEL, Text, assert_serves, generated, get, kill_worker, post
from test.ports import free_port
from test.rl_checkpoints import save_checkpoints
from test.rl_trainer import Trainer
from test.waiting import wait_until
from test.worker.dflash import save_drafter
from test.worker.heads import save_head

pytestmark = pytest.mark.slow

DRAFTED_IDS = [5, 17, 40, 99]
FROM_DISK, FROM_TRAINER = "/update_weights_from_disk", "/update_weights_from_distributed"
COUNT = 32  # numbers of a weight that are compared


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights "first" and "second" of a model, and "0" to "2" of heads in "eagle3" and in "dflash"."""
    root = tmp_path_factory.mktemp("weights")
    first = save_checkpoints(root, ("first", "second"))["first"]
    config = json.loads((first / "config.json").read_text())
    sizes = config["vocab_size"], config["hidden_size"], DRAFTED_IDS
    for seed in range(3):
        save_head(root / "eagle3", *sizes)
        save_drafter(root / "dflash", *sizes)
        for method in ("eagle3", "dflash"):
            _save_with_noise(root / method, root / f"{method}-{seed}", seed)
    return root


def _save_with_noise(head: Path, folder: Path, seed: int) -> None:
    head.rename(folder)
    torch.manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    noisy = {
        name: (tensor + 0.1 * torch.randn(tensor.shape)).bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    save_file(noisy, folder / "model.safetensors")


def serving(root: Path, log: Path, method: str, *flags: str) -> Any:
    config = json.dumps({"method": method, "model": str(root / f"{method}-0"), "num_speculative_tokens": 3})
    weights = ("--model_dir", str(root / "first"), "--weights_dir", str(root), "--speculative_config", config)
    return running_server(log, *weights, *MODEL, "--enable_rl", "--admin_key", KEY, *flags)


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(root, tmp_path_factory.mktemp("log") / "log", "eagle3") as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> Text:
    """The text of the weights "first"."""
    return without_drafts(server)


def without_drafts(server: ServerProcess) -> Text:
    _, reply = post(server, "/v1/completions", BODY | {"speculative": False})
    (choice,) = reply["choices"]
    assert "completion_tokens_details" not in reply["usage"]  # no drafts
    return Text(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def load(server: ServerProcess, folder: str, selector: str = "draft") -> None:
    status, reply = post(server, FROM_DISK, {"model_path": folder, "selector": selector})
    assert (status, reply["success"]) == (200, True), reply


def assert_drafts_with(server: ServerProcess, folder: Path, name: str = "fc.weight") -> None:
    weight = load_file(folder / "model.safetensors")[name]
    _, found = post(server, "/get_weights_by_name", {"name": name, "truncate_size": COUNT})
    assert found == weight.flatten()[:COUNT].tolist()


def run_trainer(server: ServerProcess, api: str, folder: Path, world_size: int = 2, exit_code: int = 0) -> list[Any]:
    arguments = [server.url, KEY, str(free_port()), api, str(world_size), str(folder)]
    command = [sys.executable, "-m", "test.rl_trainer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == exit_code, done.stderr + server.log
    return [reply for line in done.stdout.splitlines() for reply in json.loads(line)]


def test_a_head_gets_the_weights_of_a_folder(server: ServerProcess, root: Path, expected: Text) -> None:
    load(server, "eagle3-1")

    assert_drafts_with(server, root / "eagle3-1")
    assert_serves(server, expected)
    weights = get(server, "/get_weight_version")
    assert (weights["draft_source"], weights["draft_problem"]) == (str(root / "eagle3-1"), None)
    assert (weights["generation"], weights["source"]) == (0, "")


@pytest.mark.parametrize("api", ["sglang", "bucket", "vllm", "packed"])
def test_a_head_gets_the_weights_of_a_trainer(server: ServerProcess, root: Path, expected: Text, api: str) -> None:
    load(server, "eagle3-1")

    replies = run_trainer(server, f"{api}:draft", root / "eagle3-2")

    assert not [reply for reply in replies if "error" in reply or reply.get("success") is False], replies
    assert_drafts_with(server, root / "eagle3-2")
    assert_serves(server, expected)
    assert get(server, "/get_weight_version")["draft_source"] == "trainer"


def test_the_model_and_its_head_are_updated_one_after_the_other(
    server: ServerProcess, root: Path, expected: Text
) -> None:
    load(server, "second", "target")
    load(server, "eagle3-1")

    second = generated(server)
    assert second.ids != expected.ids
    assert second.ids == without_drafts(server).ids
    assert_drafts_with(server, root / "eagle3-1")
    load(server, "first", "all")
    assert_serves(server, expected)


def test_weights_of_drafts_that_do_not_fit_change_nothing(server: ServerProcess, root: Path, expected: Text) -> None:
    load(server, "eagle3-1")
    trainer = Trainer(server.url, KEY, free_port(), "sglang")
    assert trainer.join()["success"]
    announced = {"names": ["fc.weight"], "dtypes": ["bfloat16"], "shapes": [[3, 3]], "group_name": "trainer"}

    shape = trainer.post(FROM_TRAINER, announced | {"selector": "draft"})
    folder = post(server, FROM_DISK, {"model_path": "dflash-1", "selector": "draft"})

    trainer.post("/destroy_weights_update_group", {"group_name": "trainer"})
    trainer.close()
    assert (shape["status"], shape["success"]) == (400, False)
    assert "the draft head: update: fc.weight has shape (3, 3)" in shape["message"]
    assert folder[0] == 400
    assert "not of EAGLE-3" in folder[1]["message"]
    assert_drafts_with(server, root / "eagle3-1")
    assert_serves(server, expected)


def test_half_of_the_weights_of_drafts_is_never_used(server: ServerProcess, root: Path, expected: Text) -> None:
    run_trainer(server, "dies:draft", root / "eagle3-2", exit_code=9)

    wait_until(lambda: get(server, "/get_weight_version")["problem"] is not None)
    status, reply = post(server, "/v1/completions", BODY)
    assert status == 503
    assert "send all weights of the draft head again" in reply["error"]["message"]
    load(server, "first", "target")
    assert post(server, "/v1/completions", BODY)[0] == 503  # those of drafts are still half new
    load(server, "eagle3-2")
    assert_drafts_with(server, root / "eagle3-2")
    assert_serves(server, expected)
    wait_until(server.is_healthy)


def test_a_worker_that_dies_drafts_with_the_last_folder_again(
    server: ServerProcess, root: Path, expected: Text
) -> None:
    load(server, "eagle3-1")

    kill_worker(server)

    assert_serves(server, expected)
    assert_drafts_with(server, root / "eagle3-1")
    assert get(server, "/get_weight_version")["draft_problem"] is None


def test_a_worker_that_dies_after_a_broadcast_says_that_it_drafts_with_older_weights(
    server: ServerProcess, root: Path, expected: Text
) -> None:
    load(server, "first", "target")
    run_trainer(server, "bucket:draft", root / "eagle3-2")

    kill_worker(server)

    assert_serves(server, expected)
    assert_drafts_with(server, root / "eagle3-0")
    assert "which came from a trainer" in get(server, "/get_weight_version")["draft_problem"]
    wait_until(lambda: server.metrics()["draft_weights_old"] == 1)
    assert server.is_healthy()
    load(server, "eagle3-2")
    assert get(server, "/get_weight_version")["draft_problem"] is None
    wait_until(lambda: server.metrics()["draft_weights_old"] == 0)


@pytest.mark.tp
@pytest.mark.parametrize(
    ("flags", "method"),
    [
        (("--tp", "2"), "dflash"),
        pytest.param(("--tp", "2"), "eagle3", marks=pytest.mark.long),
        pytest.param(("--pp", "2"), "eagle3", marks=pytest.mark.long),
    ],
)
def test_every_rank_gets_its_part_of_the_head(root: Path, tmp_path: Path, flags: tuple[str, ...], method: str) -> None:
    with serving(root, tmp_path / "log", method, *flags) as server:
        expected = without_drafts(server)
        load(server, f"{method}-1")
        assert generated(server).ids == expected.ids
        replies = run_trainer(server, "bucket:draft", root / f"{method}-2", world_size=3)

        assert not [reply for reply in replies if reply.get("success") is False], replies
        assert get(server, "/get_weight_version")["draft_source"] == "trainer"
        assert generated(server).ids == expected.ids
        if "--tp" in flags:  # worker 0 has a part of the head
            assert_drafts_with(server, root / f"{method}-2")
