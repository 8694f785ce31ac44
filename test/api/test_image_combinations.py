"""Requests with images beside other features of the server. The oracle is transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightserve.links.keys import generate
from test.api.image_chats import ask, expected, user
from test.api.nodes import nodes_in
from test.api.server import ServerProcess, running_server, start_server
from test.api.test_disaggregation import end
from test.api.test_dp import BACK_S
from test.api.test_engines import CLI, serving
from test.api.test_restart import kill_worker
from test.lora_files import add_to, linear_sizes, write_adapter
from test.ports import free_port
from test.vision_model import TEXT, picture, save_vision_model
from test.waiting import wait_until
from test.worker.heads import save_head

NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3})
# a small pool: the KV of requests that have ended goes to the tier
DRAFTS = ("--speculative_config", NGRAM, "--max_total_token_num", "400", "--kv_ram_gb", "0.01")
COMBINATIONS = [
    pytest.param(DRAFTS, id="drafts-tiers"),
    pytest.param(("--tp", "2", "--deterministic"), id="tp-deterministic", marks=[pytest.mark.long, pytest.mark.tp]),
    pytest.param(("--pp", "2"), id="pp", marks=[pytest.mark.long, pytest.mark.tp]),
    pytest.param(("--dp", "2", "--max_total_token_num", "2000"), id="dp", marks=[pytest.mark.long, pytest.mark.tp]),
]
ROLES = ("--dp", "2", "--roles", "prefill,decode", "--min_remote_prefill_tokens", "32", "--max_total_token_num", "2000")
LENGTH = 24
NUM_CHATS = 6


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module", params=COMBINATIONS)
def server(
    request: pytest.FixtureRequest, vision_model: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(log, *flags_of(vision_model[0]), *request.param) as server:
        yield server


def flags_of(folder: str) -> tuple[str, ...]:
    return ("--model_dir", folder, "--device", "cpu", "--dtype", "float32", "--embed_cache_gb", "0.01")


def prompt_of(number: int) -> tuple[list[str | Image.Image], list[int | Image.Image]]:
    """For the server and for transformers."""
    image, other = picture(90 + 20 * number, 150, number), picture(60, 60, number % 2)
    words = [5 + number, 6, 7] * 4
    return [image, " ".join(f"w{word}" for word in words), other], [1, image, *words, other, 2]


def texts_of(server: ServerProcess, numbers: Sequence[int], predicted: Sequence[str] = (), **fields: Any) -> list[str]:
    """``predicted``: texts from which drafts come."""

    def text_of(number: int) -> str:
        of_chat = {"prediction": {"type": "content", "content": predicted[number]}} if predicted else {}
        return ask(server, [user(*prompt_of(number)[0])], max_tokens=LENGTH, **of_chat, **fields)[0]

    with ThreadPoolExecutor(len(numbers)) as threads:
        return list(threads.map(text_of, numbers))


def oracle_texts(model: Any, numbers: Sequence[int]) -> list[str]:
    return [expected(model, prompt_of(number)[1], LENGTH) for number in numbers]


def test_texts_beside_other_features_are_those_of_transformers(
    server: ServerProcess, vision_model: tuple[str, Any]
) -> None:
    wanted = oracle_texts(vision_model[1], range(NUM_CHATS))

    assert texts_of(server, range(NUM_CHATS)) == wanted
    assert texts_of(server, range(NUM_CHATS), predicted=wanted) == wanted  # from caches
    metrics = server.settled_metrics()
    if metrics["spec_decode_num_drafts_total"]:  # the server with DRAFTS
        used = ("spec_decode_num_accepted_tokens_total", "kv_tier_stored_tokens_total/ram")
        assert all(metrics[name] > 0 for name in used), {name: metrics[name] for name in used}


def test_choices_beside_other_features_are_those_of_transformers(
    server: ServerProcess, vision_model: tuple[str, Any]
) -> None:
    parts, oracle = prompt_of(NUM_CHATS)
    body = {"messages": [user(*parts)], "n": 3, "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    status, response = server.post("/v1/chat/completions", body)

    assert status == 200, response
    assert {choice["message"]["content"] for choice in response["choices"]} == {expected(vision_model[1], oracle, 8)}


@pytest.mark.long
@pytest.mark.tp
@pytest.mark.parametrize(
    "ranks",
    [
        *(("--tp", "2"), ("--pp", "2"), ("--tp", "2", "--ep", "2", "--enable_dp_attention")),
        ("--dp", "2", "--cluster_policy", "round_robin"),
    ],
    ids=" ".join,
)
def test_ranks_on_another_node_read_embeddings_from_node_0_also_when_one_has_died(
    tmp_path: Path, ranks: Sequence[str]
) -> None:
    folder, model = save_vision_model(tmp_path / "model", "qwen3_vl_moe")  # its second stage reads embeddings too
    wanted = oracle_texts(model, range(NUM_CHATS))

    with nodes_in(tmp_path, 2, *flags_of(folder), "--max_total_token_num", "2000", *ranks) as nodes:
        other, first = nodes.start(1), nodes.start(0)
        nodes.wait_ready(first)
        assert texts_of(first, range(NUM_CHATS)) == wanted, nodes.logs()
        with ThreadPoolExecutor(1) as threads:
            broken = threads.submit(texts_of, first, range(NUM_CHATS), cache_salt="other")
            wait_until(lambda: first.metrics()["num_requests_running"] > 0 or broken.done())
            kill_worker(other, "ls-worker-1")
            assert broken.result() == wanted, nodes.logs()
        rank = "model worker 0 on node 1 of engine 1" if "--dp" in ranks else "model worker 1 on node 1"
        first.wait_for_log(f"{rank} died (signal 9); restarting the workers")
        assert texts_of(first, range(NUM_CHATS), cache_salt="third") == wanted, nodes.logs()


@pytest.mark.long
@pytest.mark.tp
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_drafts_after_images_change_no_text_also_when_a_rank_has_died(
    vision_model: tuple[str, Any], tmp_path: Path, method: str
) -> None:
    """The model itself is the draft model, which sees no images."""
    folder, model = vision_model
    drafter = folder
    if method == "eagle3":
        drafter = save_head(tmp_path / "head", TEXT["vocab_size"], TEXT["hidden_size"], list(range(40)))
    config = json.dumps({"method": method, "model": drafter, "num_speculative_tokens": 2})
    wanted = oracle_texts(model, range(NUM_CHATS))
    flags = (*flags_of(folder), "--speculative_config", config, "--max_total_token_num", "400", "--tp", "2")

    with running_server(tmp_path / "log", *flags) as server:
        assert texts_of(server, range(NUM_CHATS)) == wanted
        assert server.settled_metrics()["spec_decode_num_draft_tokens_total"] > 0
        kill_worker(server, "ls-worker-1")
        assert texts_of(server, range(NUM_CHATS)) == wanted


@pytest.mark.long
def test_adapters_change_the_text_part_only(vision_model: tuple[str, Any], tmp_path: Path) -> None:
    folder, model = vision_model
    text_part = {name: size for name, size in linear_sizes(model).items() if "language_model" in name}
    adapter = write_adapter(tmp_path / "adapter", text_part, strength=0.5)
    adapted = copy.deepcopy(model)
    add_to(adapted, adapter)
    flags = (*flags_of(folder), "--max_total_token_num", "2000", "--lora_modules", f"other={adapter}")

    with running_server(tmp_path / "log", *flags) as server:
        plain, with_adapter = texts_of(server, [0, 1]), texts_of(server, [0, 1], model="other")

    assert plain == oracle_texts(model, [0, 1])
    assert with_adapter == oracle_texts(adapted, [0, 1])
    assert plain != with_adapter


@pytest.mark.long  # test_disaggregation.py has texts without images
@pytest.mark.tp
def test_kv_of_images_comes_from_a_prefill_engine_also_if_its_worker_is_killed(
    vision_model: tuple[str, Any], tmp_path: Path
) -> None:
    folder, model = vision_model
    words = [[5 + number, 6, 7] * 30 for number in range(4)]
    images = [(picture(90 + 20 * number, 150, number), picture(60, 60, number % 2)) for number in range(4)]
    wanted = [
        expected(model, [1, first, *ids, second, *ids[:9], 2], LENGTH)
        for ids, (first, second) in zip(words, images, strict=True)
    ]

    def texts(server: ServerProcess, **fields: Any) -> list[str]:
        def text_of(number: int) -> str:
            first, second = images[number]
            text = " ".join(f"w{word}" for word in words[number])
            message = user(first, text, second, " ".join(text.split()[:9]))
            return ask(server, [message], max_tokens=LENGTH, **fields)[0]

        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(text_of, range(4)))

    with running_server(tmp_path / "log", *flags_of(folder), *ROLES) as server:
        assert texts(server) == wanted
        metrics = server.settled_metrics()
        assert metrics["kv_transfer_received_tokens_total"] >= 64 * 4
        assert metrics["kv_transfer_given_up_tokens_total"] == metrics["kv_transfer_recomputed_tokens_total"] == 0
        with ThreadPoolExecutor(1) as threads:
            again = threads.submit(texts, server, cache_salt="again")
            wait_until(lambda: server.metrics()["num_requests_running"] > 0)
            kill_worker(server)

            assert again.result() == wanted


@pytest.mark.long  # two engines with two ranks and an encoder each
@pytest.mark.tp
def test_engines_of_a_gateway_read_images_in_attention_groups_also_if_one_is_killed(tmp_path: Path) -> None:
    folder, model = save_vision_model(tmp_path / "model", "qwen3_vl_moe")
    generate(tmp_path / "keys")
    keys = ("--cluster_keys", str(tmp_path / "keys"))
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    groups = ("--tp", "2", "--ep", "2", "--enable_dp_attention", "--max_total_token_num", "2000")
    with ExitStack() as running:
        engines = []
        for number, address in enumerate(addresses):
            flags = (*flags_of(folder), *groups, *keys, "--listen", address)
            engines.append(start_server(tmp_path / f"engine-{number}.log", [*CLI, "engine", *flags]))
            running.callback(end, engines[-1])
        gateway = ("--model_dir", folder, *keys, "--engines", ",".join(addresses))
        server = running.enter_context(running_server(tmp_path / "log", *gateway))
        wait_until(lambda: serving(server) == 2, BACK_S)
        wanted = oracle_texts(model, range(NUM_CHATS))

        assert texts_of(server, range(NUM_CHATS)) == wanted
        assert server.settled_metrics()["images_encoded_total"] >= NUM_CHATS
        with ThreadPoolExecutor(1) as threads:
            again = threads.submit(texts_of, server, range(NUM_CHATS), cache_salt="again")
            wait_until(lambda: server.metrics()["num_requests_running"] > 0)
            engines[1].process.kill()  # the launcher: its children exit with it

            assert again.result() == wanted
        wait_until(lambda: serving(server) == 1)


@pytest.mark.long
def test_quantised_text_weights_read_images(vision_model: tuple[str, Any], tmp_path: Path) -> None:
    """The vision tower is as it was: 8 bits of the text part change few tokens."""
    flags = (*flags_of(vision_model[0]), "--max_total_token_num", "2000", "--quantization", "int8")

    with running_server(tmp_path / "log", *flags) as server:
        texts = texts_of(server, range(NUM_CHATS))
        again = texts_of(server, range(NUM_CHATS))

    wanted = oracle_texts(vision_model[1], range(NUM_CHATS))
    assert again == texts
    assert len(set(texts)) == NUM_CHATS
    starts = [text.split()[0] == other.split()[0] for text, other in zip(texts, wanted, strict=True)]
    assert sum(starts) > NUM_CHATS // 2
