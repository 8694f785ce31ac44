"""A real server under the HTTP clients of TRL, slime and AReaL: their calls in their order, and with --long themselves.

The quick tests send what these clients send (TRL 1.16, slime of August 2026, AReaL 1.0.4) and read what they read.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from test.api.server import START_S, ServerProcess, running_server
from test.lora_files import add_to, linear_sizes, write_adapter
from test.ports import free_port
from test.rl_checkpoints import save_checkpoints
from test.rl_trainer import Trainer
from test.waiting import wait_until

pytestmark = pytest.mark.slow

PROMPT = [5, 17, 3, 99, 42]
TEMPERATURE = 0.7
MAX_LORAS = 3  # of async GRPO: how old a policy may be, and two


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = save_checkpoints(tmp_path_factory.mktemp("weights"), ("first", "second"))
    sizes = linear_sizes(LlamaForCausalLM.from_pretrained(folders["first"]))
    for version in (1, 2):
        write_adapter(folders["first"].parent / "adapters" / f"policy-v{version}", sizes, seed=version, rank=4)
    return folders


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Without keys: these clients send none."""
    first = folders["first"]
    flags: tuple[str, ...] = (
        "--device",
        "cpu",
        "--data_type",
        "float32",
        "--max_total_token_num",
        "4096",
        "--enable_rl",
    )
    flags += (
        "--max_req_total_len",
        "2048",
        "--logprobs_mode",
        "processed_logprobs",
        "--weights_dir",
        str(first.parent),
        "--lora_dir",
        str(first.parent / "adapters"),
        "--max_loras",
        str(MAX_LORAS),
    )
    with running_server(tmp_path_factory.mktemp("log") / "log", "--model_dir", str(first), *flags) as server:
        yield server


def get(server: ServerProcess, path: str) -> Any:
    with urllib.request.urlopen(server.url + path) as response:
        return json.load(response)


def ok(server: ServerProcess, path: str, body: dict[str, Any] | None = None) -> Any:
    status, reply = server.post(path, body or {})
    assert status == 200, reply
    return reply


def logprobs_of(folder: Path, ids: list[int], temperature: float, adapter: Path | None = None) -> Any:
    """[tokens, vocab] of what follows each token, by transformers."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        add_to(model, adapter)
    with torch.inference_mode():
        return (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)


def assert_sampled_from(folder: Path, prompt: list[int], output: list[int], logprobs: list[float], t: float) -> None:
    rows = logprobs_of(folder, prompt + output, t)[len(prompt) - 1 :]
    expected = [float(row[token]) for row, token in zip(rows, output, strict=False)]
    assert logprobs == pytest.approx(expected, abs=2e-3)


def test_trls_calls_in_their_order(server: ServerProcess, folders: dict[str, Path]) -> None:
    assert get(server, "/health") is not None
    model = get(server, "/v1/models")["data"][0]["id"]
    assert get(server, "/server_info?config_format=json")["vllm_config"]["weight_transfer_config"] is not None
    trainer = Trainer(server.url, "", free_port(), "packed", get(server, "/get_world_size")["world_size"] + 1)
    assert "message" in trainer.join()
    started, updated, finished = trainer.update(load_file(folders["second"] / "model.safetensors"), "2")
    assert [set(reply) for reply in (started, updated, finished)] == [{"message"}] * 3
    trainer.close()
    assert ok(server, "/reset_prefix_cache")["success"] is True
    sampling = {"n": 2, "repetition_penalty": 1.0, "temperature": TEMPERATURE, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    asked = {"model": model, **sampling, "max_tokens": 5, "return_token_ids": True, "return_tokens_as_token_ids": True}

    choices = ok(server, "/v1/completions", asked | {"prompt": [PROMPT, PROMPT[:2]], "logprobs": 0})["choices"]

    assert [choice["prompt_token_ids"] for choice in choices[::2]] == [PROMPT, PROMPT[:2]]
    logprobs = choices[0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in choices[0]["token_ids"]]
    assert len(logprobs["top_logprobs"]) == len(logprobs["tokens"])
    assert_sampled_from(folders["second"], PROMPT, choices[0]["token_ids"], logprobs["token_logprobs"], TEMPERATURE)
    scoring = {"model": model, "prompt": [PROMPT], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 100}
    [scored] = ok(server, "/v1/completions", scoring)["choices"]
    assert scored["prompt_logprobs"][0] is None
    assert all(str(token) in row for token, row in zip(PROMPT[1:], scored["prompt_logprobs"][1:], strict=True))
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 1, "tool_choice": "none"}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    reply = ok(
        server, "/v1/chat/completions", asked | chat | {"tools": [tool], "chat_template": "{{ tools | length }} tool"}
    )
    _, expected = server.post("/tokenize", {"prompt": "1 tool", "add_special_tokens": False})
    assert reply["prompt_token_ids"] == expected["tokens"]
    for choice in reply["choices"]:
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]


def test_the_calls_of_trls_async_grpo_with_an_adapter(server: ServerProcess, folders: dict[str, Path]) -> None:
    ok(server, "/update_weights_from_disk", {"model_path": "first"})
    config = get(server, "/server_info?config_format=json")["vllm_config"]
    assert config["lora_config"]["max_loras"] == MAX_LORAS
    assert config["lora_config"]["max_lora_rank"] >= 4
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["model_config"]["dtype"] == "torch.float32"
    for version in (1, 2):
        adapter = folders["first"].parent / "adapters" / f"policy-v{version}"
        load = {"lora_name": adapter.name, "lora_path": str(adapter), "load_inplace": False}
        assert server.post("/pause?mode=keep", {})[0] == 200
        assert server.post("/v1/load_lora_adapter", load)[0] == 200
        assert server.post("/resume", {})[0] == 200
        sampling = {"temperature": 1.0, "seed": 2**62 + version, "logprobs": 0, "return_token_ids": True}

        body = {"model": adapter.name, "prompt": PROMPT, "max_tokens": 6, **sampling}
        [choice] = ok(server, "/v1/completions", body)["choices"]

        output, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        rows = logprobs_of(folders["first"], PROMPT + output, 1.0, adapter)[len(PROMPT) - 1 :]
        expected = [float(row[token]) for row, token in zip(rows, output, strict=False)]
        assert logprobs == pytest.approx(expected, abs=2e-3)
        assert server.post("/v1/unload_lora_adapter", {"lora_name": adapter.name})[0] == 200


def test_slimes_calls_in_their_order(server: ServerProcess, folders: dict[str, Path]) -> None:
    info = get(server, "/server_info")
    assert (info["tp_size"], info["pp_size"], info["disaggregation_mode"]) == (1, 1, "null")
    assert get(server, "/health_generate")
    trainer = Trainer(server.url, "", free_port(), "sglang")
    assert trainer.join()["success"]
    rollout: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": slime_sampling(1500), "return_logprob": True}
    with ThreadPoolExecutor(1) as clients:
        before = server.metrics()["generation_tokens_total"]
        running = clients.submit(ok, server, "/generate", rollout)
        wait_until(lambda: server.metrics()["generation_tokens_total"] > before or running.done())
        assert server.post("/abort_request", {"abort_all": True})[0] == 200
        aborted = running.result()
    wait_until(lambda: sum_of_loads(get(server, "/v1/loads?include=core")) == 0)
    assert aborted["meta_info"]["finish_reason"]["type"] in ("abort", "length")

    assert ok(server, "/pause_generation")["status"] == "ok"
    with urllib.request.urlopen(f"{server.url}/flush_cache") as flushed:
        assert flushed.status == 200
    for part in halves(load_file(folders["second"] / "model.safetensors")):
        body = trainer.announced(part) | {"flush_cache": False, "weight_version": "7"}
        reply = trainer.beside("/update_weights_from_distributed", body, partial(trainer.send_each, part))
        assert reply["success"], reply
    assert ok(server, "/continue_generation")["status"] == "ok"

    assert get(server, "/get_weight_version")["weight_version"] == "7"
    done = [entry[1] for entry in aborted["meta_info"]["output_token_logprobs"]]
    rest = rollout | {"input_ids": PROMPT + done, "sampling_params": slime_sampling(8)}
    continued = ok(server, "/generate", rest)
    entries = continued["meta_info"]["output_token_logprobs"]
    assert continued["meta_info"]["weight_version"] == "7"
    assert_sampled_from(
        folders["second"], rest["input_ids"], [entry[1] for entry in entries], [entry[0] for entry in entries], 1.0
    )
    assert trainer.post("/destroy_weights_update_group", {"group_name": "trainer"})["success"]
    trainer.close()


def slime_sampling(tokens: int) -> dict[str, Any]:
    fields = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": tokens, "stop": None}
    return fields | {
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": 42,
    }


def sum_of_loads(reply: Any) -> int:
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in reply["loads"])


def halves(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    items = list(tensors.items())
    return [dict(items[:9]), dict(items[9:])]


def test_areals_calls_in_their_order(server: ServerProcess, folders: dict[str, Path]) -> None:
    health = urllib.request.Request(f"{server.url}/health", b"{}", {"Content-Type": "application/json"}, method="GET")
    with urllib.request.urlopen(health) as response:
        assert response.status == 200
    trainer = Trainer(server.url, "", free_port(), "sglang")  # its port is a string, as AReaL's
    assert trainer.join()["success"]
    ok(server, "/pause_generation")
    tensors = load_file(folders["first"] / "model.safetensors")
    body = trainer.announced(tensors) | {"abort_all_requests": True}
    assert trainer.beside("/update_weights_from_distributed", body, lambda: trainer.send_each(tensors))["success"]
    ok(server, "/continue_generation")
    sampling = {"top_p": 1.0, "top_k": 100_000_000, "max_new_tokens": 6, "temperature": 0.0, "stop_token_ids": [0]}
    sampling |= {"ignore_eos": True, "skip_special_tokens": False, "frequency_penalty": 0.0}
    asked = {"input_ids": PROMPT, "image_data": None, "sampling_params": sampling, "return_logprob": True}

    meta = ok(server, "/generate", asked | {"stream": False})["meta_info"]

    entries = meta["output_token_logprobs"]
    assert (meta["finish_reason"]["type"], len(entries)) == ("length", 6)
    best = logprobs_of(folders["first"], PROMPT + [entry[1] for entry in entries], 1.0).argmax(-1)
    assert [entry[1] for entry in entries] == best[len(PROMPT) - 1 : -1].tolist()
    disk = {"model_path": str(folders["second"]), "abort_all_requests": True}
    assert ok(server, "/update_weights_from_disk", disk)["success"]
    trainer.post("/destroy_weights_update_group", {"group_name": "trainer"})
    trainer.close()


def test_the_calls_of_verls_http_adapter(server: ServerProcess, folders: dict[str, Path]) -> None:
    """It leaves out what is None, and sends an empty ``rid`` to abort all."""
    ok(server, "/update_weights_from_disk", {"model_path": "first"})
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert server.post(path, {"tags": ["kv_cache"]}) == (200, None)
    with urllib.request.urlopen(f"{server.url}/flush_cache") as flushed:
        assert flushed.status == 200
    assert [model["id"] for model in get(server, "/v1/models")["data"]] == ["first"]
    sampling = {"temperature": TEMPERATURE, "top_p": 1.0, "top_k": -1, "max_new_tokens": 6, "repetition_penalty": 1.0}
    asked = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}

    entries = ok(server, "/generate", asked)["meta_info"]["output_token_logprobs"]

    ids, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
    assert_sampled_from(folders["first"], PROMPT, ids, logprobs, TEMPERATURE)
    assert server.post("/abort_request", {"rid": "", "abort_all": True})[0] == 200
    pickled = {"serialized_named_tensors": ["cGlja2xl"], "load_format": None, "flush_cache": False}
    status, reply = server.post("/update_weights_from_tensor", pickled)
    assert status == 400
    assert "sends pickled tensors" in reply["error"]["message"]


# their own classes


def run_client(name: str, server: ServerProcess, folder: Path) -> dict[str, Any]:
    """Each of its calls may take as long as a start of the server: a sleep starts new workers."""
    command = [sys.executable, "-m", f"test.rl_clients.{name}", server.url, str(free_port()), str(folder)]
    out, calls = folder.parent / f"{name}.out", folder.parent / f"{name}.calls"
    with (
        out.open("wb") as stdout,
        calls.open("wb") as stderr,
        subprocess.Popen(command, stdout=stdout, stderr=stderr) as client,
    ):
        try:
            wait_until(lambda: client.poll() is not None, START_S, progress=lambda: calls.read_text()[-1000:])
        finally:
            client.kill()
    if "is absent" in calls.read_text():
        pytest.skip(calls.read_text().strip())
    assert client.returncode == 0, calls.read_text() + server.log
    results: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return results


@pytest.mark.long
def test_trls_own_client(server: ServerProcess, folders: dict[str, Path]) -> None:
    results = run_client("trl", server, folders["second"])

    generated, vocab = results["generated"], LlamaForCausalLM.from_pretrained(folders["second"]).config.vocab_size
    assert results["world_size"] == 1
    assert len(generated["completion_ids"]) == 6
    for index, (ids, logprobs) in enumerate(zip(generated["completion_ids"], generated["logprobs"], strict=True)):
        sampled = [row[0] for row in logprobs]
        assert_sampled_from(folders["second"], generated["prompt_ids"][index // 2], ids, sampled, TEMPERATURE)
    ids = results["sequences"][0]
    rows = logprobs_of(folders["second"], ids, 1.0)
    expected = [float(row[token]) for row, token in zip(rows[len(PROMPT) - 1 :], ids[len(PROMPT) :], strict=False)]
    assert [row[0] for row in results["scored"]["actual_logprobs"][0]] == pytest.approx(expected, abs=2e-3)
    assert {len(row) for row in results["scored"]["logprobs"][0]} == {100}
    assert len(results["chats"]["completion_ids"]) == 2
    uniform = [rows[0][0] for rows in results["flat"]["logprobs"]]  # the head was set to zero
    assert uniform == pytest.approx([-math.log(vocab)] * 3, abs=1e-3)


@pytest.mark.long
def test_slimes_own_engine_class(server: ServerProcess, folders: dict[str, Path]) -> None:
    results = run_client("slime", server, folders["second"])

    assert all(reply["success"] for reply in (results["joined"], *results["updates"], results["from_disk"]))
    assert results["version"] == "7"
    assert (results["type"], results["parallel"]["tp_size"], results["healthy"]) == ("regular", 1, True)
    assert get(server, "/get_weight_version")["weight_version"] == "8"


@pytest.mark.long
def test_areals_own_backend_class(server: ServerProcess, folders: dict[str, Path]) -> None:
    results = run_client("areal", server, folders["second"])

    assert all(results[name]["success"] for name in ("joined", "updated", "from_disk"))
    best = logprobs_of(folders["second"], PROMPT + results["ids"], 1.0).argmax(-1)
    assert results["ids"] == best[len(PROMPT) - 1 : -1].tolist()
    assert (len(results["logprobs"]), results["why"]) == (6, "length")


@pytest.mark.long
def test_verls_own_http_adapter(server: ServerProcess, folders: dict[str, Path]) -> None:
    results = run_client("verl", server, folders["second"])

    assert results["updated"]["success"]
    assert "400" in results["pickled"]
    assert results["models"]["data"]
    ids, logprobs = results["ids"], [entry[0] for entry in results["logprobs"]]
    assert_sampled_from(folders["second"], PROMPT, ids, logprobs, 1.0)
