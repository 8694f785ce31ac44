"""Requests with images: the encoder dies, hangs or gets files that are damaged."""

from __future__ import annotations

import base64
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightserve.links.keys import generate
from lightserve.media.fetch.fetcher import MAX_PER_HOST
from test.api.server import ServerProcess
from test.faults.cases.sounds import pids_of
from test.faults.start_case import Start, StartCase
from test.media.corpus import damaged_files, flipped_files, hostile_videos, unusual_files
from test.media.fetch.image_host import answer, image_host_in_thread
from test.ports import free_port
from test.vision_model import picture, png, save_vision_model
from test.waiting import wait_until

REQUESTS = 12
FLAGS = ("--device", "cpu", "--max_total_token_num", "2000", "--embed_cache_gb", "0.01")


def launch(start: Start, *flags: str) -> ServerProcess:
    folder = start.base / "model"
    folder.mkdir()
    path, _ = save_vision_model(folder)
    server = Start(start.base, (), start.exits).launch("--model_dir", path, *FLAGS, *flags)
    start.wait_ready(server)
    wait_until(server.is_healthy)
    return server


def ask(server: ServerProcess, data: bytes) -> tuple[int, Any]:
    return ask_url(server, "data:;base64," + base64.b64encode(data).decode())


def ask_video(server: ServerProcess, data: bytes) -> tuple[int, Any]:
    url = "data:;base64," + base64.b64encode(data).decode()
    messages = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}]}]
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})


def ask_slow_video(server: ServerProcess, fps: float) -> tuple[int, Any]:
    """With more rotary positions than the model has."""
    url = "data:;base64," + base64.b64encode(png(picture(60, 60))).decode()
    messages = [{"role": "user", "content": [{"type": "video", "video": [url] * 64, "fps": fps}]}]
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})


def ask_url(server: ServerProcess, url: str) -> tuple[int, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/chat/completions", body)


def text_of(server: ServerProcess, seed: int) -> str:
    status, response = ask(server, png(picture(140, 140, seed)))
    assert status == 200, response
    text: str = response["choices"][0]["message"]["content"]
    return text


def signal_encoder(number: signal.Signals, start: Start, *flags: str) -> None:
    """While images are encoded. All requests get the text that they get without a fault."""
    server = launch(start, *flags)
    with ThreadPoolExecutor(REQUESTS) as threads:
        texts = [threads.submit(text_of, server, seed) for seed in range(REQUESTS)]
        (encoder,) = server.processes()["ls-encoder"]
        os.kill(encoder.pid, number)
        found = [text.result() for text in texts]
    server.wait_for_log("a new encoder is ready")

    assert [text_of(server, seed) for seed in range(REQUESTS)] == found
    assert len(set(found)) > 1
    assert server.stop() == 0


def encoders_of(server: ServerProcess) -> dict[str, list[int]]:
    """Process ids by name."""
    found = server.processes()
    return {name: [process.pid for process in found[name]] for name in found if name.startswith("ls-encoder")}


def kill_one_of_two_encoders(start: Start) -> None:
    """All requests get the text that they get without a fault, and the other encoder goes on."""
    server = launch(start, "--visual_dp", "2")
    before = encoders_of(server)
    with ThreadPoolExecutor(REQUESTS) as threads:
        texts = [threads.submit(text_of, server, seed) for seed in range(REQUESTS)]
        os.kill(before["ls-encoder-1"][0], signal.SIGKILL)
        found = [text.result() for text in texts]
    server.wait_for_log("a new encoder is ready")

    assert [text_of(server, seed) for seed in range(REQUESTS)] == found
    assert len(set(found)) > 1
    after = encoders_of(server)
    assert after["ls-encoder"] == before["ls-encoder"]
    assert after["ls-encoder-1"] != before["ls-encoder-1"]
    assert server.stop() == 0


def kill_router(start: Start) -> None:
    """Of one of two engines. Its encoder is replaced too, because rows that it writes are given to other images."""
    server = launch(start, "--dp", "2")
    encoders = encoders_of(server)
    with ThreadPoolExecutor(REQUESTS) as threads:
        texts = [threads.submit(text_of, server, seed) for seed in range(REQUESTS)]
        os.kill(server.processes()["ls-router"][0].pid, signal.SIGKILL)
        found = [text.result() for text in texts]
    server.wait_for_log("is back")
    server.wait_for_log("a new encoder is ready")

    assert [text_of(server, seed) for seed in range(REQUESTS)] == found
    assert len(set(found)) > 1
    after = encoders_of(server)
    assert after["ls-encoder"] != encoders["ls-encoder"]
    assert after["ls-encoder-1"] == encoders["ls-encoder-1"]
    assert server.stop() == 0


def kill_rank_on_another_node(start: Start) -> None:
    (start.base / "model").mkdir()
    path, _ = save_vision_model(start.base / "model")
    generate(start.base / "keys")
    place = ("--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    flags = ("--model_dir", path, *FLAGS, "--tp", "2", *place, "--cluster_keys", str(start.base / "keys"))
    nodes = Start(start.base, (), start.exits)
    other, first = nodes.launch(*flags, "--node_rank", "1"), nodes.launch(*flags)
    start.wait_ready(first)
    wait_until(first.is_healthy)
    with ThreadPoolExecutor(REQUESTS) as threads:
        texts = [threads.submit(text_of, first, seed) for seed in range(REQUESTS)]
        wait_until(lambda: any(text.done() for text in texts))
        (rank,) = other.processes()["ls-worker-1"]
        os.kill(rank.pid, signal.SIGKILL)
        found = [text.result() for text in texts]
    first.wait_for_log("model worker 1 on node 1 died (signal 9); restarting the workers")

    assert [text_of(first, seed) for seed in range(REQUESTS)] == found
    assert len(set(found)) > 1
    assert first.stop() == 0
    assert other.stop() == 0


def send_damaged_files(start: Start) -> None:
    """Every one is refused, or read if only its metadata are unusual, and all processes live on."""
    server = launch(start)
    before = pids_of(server)
    damaged = [ask(server, data)[0] for data in damaged_files()]
    unusual = [ask(server, data)[0] for data in unusual_files()]
    assert set(damaged) == {400}, damaged
    assert set(unusual) == {200}, unusual
    assert {ask_video(server, data)[0] for data in damaged_files()} == {400}
    assert {ask_video(server, data)[0] for data in hostile_videos()} == {400}
    assert {ask_slow_video(server, fps)[0] for fps in (0.01, 1e-4, 1e-9, 5e-324)} == {400}
    flipped = {ask(server, data)[0] for data in flipped_files()}
    flipped |= {ask_video(server, data)[0] for data in flipped_files()}
    assert flipped <= {200, 400}
    text_of(server, 1)

    assert pids_of(server) == before
    assert server.stop() == 0


def let_image_host_hang(start: Start) -> None:
    """Requests for its images are refused after --media_timeout; others are served meanwhile, and by it afterwards."""
    server = launch(start, "--media_private_hosts", "127.0.0.1", "--allow_http_media", "--media_timeout", "2")
    whole = png(picture(140, 140, 3))
    with (
        image_host_in_thread(lambda target: answer(whole) if target == "/cat" else None, is_tls=False) as host,
        ThreadPoolExecutor(REQUESTS) as threads,
    ):
        hanging = [threads.submit(ask_url, server, host.url("/hang", "127.0.0.1", "http")) for _ in range(REQUESTS)]
        wait_until(lambda: host.num_open == MAX_PER_HOST)
        found = text_of(server, 3)
        assert not any(each.done() for each in hanging)
        statuses = Counter(each.result()[0] for each in hanging)
        assert statuses == {400: MAX_PER_HOST, 429: REQUESTS - MAX_PER_HOST}, statuses
        _, response = ask_url(server, host.url("/cat", "127.0.0.1", "http"))

    assert response["choices"][0]["message"]["content"] == found
    assert server.stop() == 0


WAIT = "requests with images wait for its replacement, and get the same text"
START_CASES = [
    StartCase("kill -9 ls-encoder, images", lambda start: signal_encoder(signal.SIGKILL, start), WAIT, 60.0),
    StartCase(
        "stop ls-encoder, images",
        lambda start: signal_encoder(signal.SIGSTOP, start, "--process_timeout", "3"),
        f"it is killed after --process_timeout; {WAIT}",
        60.0,
    ),
    StartCase("kill -9 ls-encoder-1, images, --visual_dp 2", kill_one_of_two_encoders, WAIT, 60.0),
    StartCase("kill -9 a rank on another node, images", kill_rank_on_another_node, "streams go on, same text", 120.0),
    StartCase("damaged image files", send_damaged_files, "400 each, and no process ends", 60.0),
    StartCase(
        "kill -9 ls-router, images, --dp 2",
        kill_router,
        "its requests go on in the other engine, with the same text; its encoder is replaced too",
        90.0,
    ),
    StartCase(
        "a host of images hangs",
        let_image_host_hang,
        "400 after --media_timeout, 429 for those that wait for it; other requests are served",
        60.0,
    ),
]
