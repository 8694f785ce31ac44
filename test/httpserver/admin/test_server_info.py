"""GET /get_server_info"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightserve.config import HttpConfig
from lightserve.httpserver.admin.server_info import server_info
from lightserve.messages.metrics import Recorder
from lightserve.messages.output import RouterStats
from lightserve.model_files.config.sampling_defaults import SamplingDefaults
from test.httpserver.app_client import served


def info(run_dir: Path, stats: RouterStats) -> Any:
    async def ask() -> Any:
        async with served(run_dir, HttpConfig(model_name=["tiny", "other"])) as server:
            server.context.manager.stats = stats
            return (await server.get("/get_server_info")).json()

    return asyncio.run(ask())


def test_it_says_what_runs_and_its_limits(tmp_path: Path) -> None:
    found = info(tmp_path, RouterStats(step_age_s=0.0, metrics=Recorder().snapshot()))

    assert found["model"]["name"] == "tiny"
    assert found["model"]["names"] == ["tiny", "other"]
    assert found["limits"] == {"max_req_total_len": 1024, "max_total_token_num": 4096}
    assert found["unhealthy_reason"] is None


def test_it_shows_the_load(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.values |= {"num_requests_running": 2.0, "num_requests_waiting": 3.0, "kv_used_tokens": 1024.0}
    recorder.values |= {"kv_cache_usage_perc": 0.25, "generation_tokens_total": 40.0}

    load = info(tmp_path, RouterStats(step_age_s=0.0, metrics=recorder.snapshot()))["load"]

    assert (load["running_requests"], load["waiting_requests"]) == (2, 3)
    assert (load["kv_used_tokens"], load["kv_usage"]) == (1024, 0.25)
    assert load["generated_tokens"] == 40


def test_it_says_how_a_request_without_parameters_is_sampled(tmp_path: Path) -> None:
    async def ask(defaults: dict[str, float]) -> Any:
        async with served(tmp_path) as server:
            return await server_info(replace(server.context, sampling_defaults=SamplingDefaults(defaults)))

    plain, of_model = (asyncio.run(ask(defaults)) for defaults in ({}, {"temperature": 0.6, "top_k": 20}))

    assert plain["sampling"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    assert of_model["sampling"] == plain["sampling"] | {"temperature": 0.6, "top_k": 20}


def test_it_says_whether_the_model_reads_images(tmp_path: Path) -> None:
    async def ask(images: Any) -> Any:
        async with served(tmp_path) as server:
            return await server_info(replace(server.context, images=images))

    reader = SimpleNamespace(layout=SimpleNamespace(kinds=("image",)))
    of_text, of_images = (asyncio.run(ask(images)) for images in (None, reader))

    assert of_text["model"]["input_modalities"] == ["text"]
    assert of_images["model"]["input_modalities"] == ["text", "image"]
