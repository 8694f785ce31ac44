"""An LLM with attention groups: each rank has requests of its own, and the ranks share the experts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightserve import LLM
from lightserve.errors import ServerError
from lightserve.messages.step import Step, StepResult
from lightserve.text.beam_search import BeamParams
from lightserve.worker.rpc import GetResult
from test.api.image_chats import NEW_TOKENS, expected
from test.api.test_ep import save_expert_model
from test.lora_files import write_adapter
from test.offline.test_ranks import workers_of_this_process
from test.vision_model import picture, save_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.tp, pytest.mark.long]

OPTIONS: dict[str, Any] = {"device": "cpu", "data_type": "float32", "max_total_token_num": 800, "max_loras": 1}
TEXT_PART = {"type": "text", "text": "w40"}
GROUPS: dict[str, Any] = {"tp": 2, "ep": 2, "enable_dp_attention": True}
PROMPTS = [[(5 + number + 7 * i) % 131 for i in range(length)] for number, length in enumerate((3, 90, 7, 40, 65))]


def texts(llm: LLM, **parameters: Any) -> list[list[int]]:
    generations = llm.generate(PROMPTS, max_tokens=20, ignore_eos=True, **parameters)
    return [generation.token_ids for generation in generations]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_expert_model(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def alone(folder: str) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def grouped(folder: str) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS, **GROUPS) as llm:
        yield llm
    assert not workers_of_this_process()


def test_groups_generate_the_texts_of_one_rank(grouped: LLM, alone: LLM) -> None:
    assert texts(grouped, temperature=0) == texts(alone, temperature=0)
    assert texts(grouped, temperature=1.0, seed=7, n=2) == texts(alone, temperature=1.0, seed=7, n=2)
    cached = [group.pool.cached_tokens for group in grouped._scheduler.groups]
    assert len(cached) == 2
    assert all(cached)  # both have had requests


def test_beams_of_groups_are_those_of_one_rank(grouped: LLM, alone: LLM) -> None:
    params = BeamParams(num_beams=3, n=3, max_new_tokens=12)

    beams, wanted = (
        [[one.token_ids for one in of_prompt] for of_prompt in llm.beam_search(PROMPTS, params)]
        for llm in (grouped, alone)
    )

    assert beams == wanted


def test_every_group_has_the_adapters(grouped: LLM, alone: LLM, tmp_path: Path) -> None:
    size = alone.worker.model_config.count("hidden_size")
    queries = alone.worker.model_config.count("num_attention_heads") * alone.worker.model_config.head_dim
    layers = range(alone.worker.model_config.count("num_hidden_layers"))
    sizes = {f"model.layers.{layer}.self_attn.q_proj": (queries, size) for layer in layers}
    adapter = str(write_adapter(tmp_path / "adapter", sizes, strength=20.0))

    assert texts(grouped, temperature=0, lora=adapter) == texts(alone, temperature=0, lora=adapter)
    assert texts(grouped, temperature=0, lora=adapter) != texts(alone, temperature=0)


def test_groups_free_the_requests_of_a_call_that_was_interrupted(
    grouped: LLM, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = grouped._ranks.launch

    def interrupted(step: Step) -> GetResult:
        launch(step)

        def wait() -> StepResult:
            raise KeyboardInterrupt

        return wait

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(grouped._ranks, "launch", interrupted)
            with pytest.raises(KeyboardInterrupt):
                texts(grouped, temperature=0)

    assert texts(grouped, temperature=0) == texts(alone, temperature=0)
    assert [group.pool.used for group in grouped._scheduler.groups] == [0, 0]


def test_groups_share_the_embeddings_of_images(tmp_path: Path) -> None:
    folder, model = save_vision_model(tmp_path, "qwen3_vl_moe")
    images = [picture(84, 112, number) for number in range(4)]
    chats = [[{"role": "user", "content": [{"type": "image", "image": image}, TEXT_PART]}] for image in images]

    with LLM(folder, device="cpu", max_total_token_num=2000, embed_cache_gb=0.01, **GROUPS) as llm:
        outs = llm.chat(chats * 2, max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)

    assert [out.text for out in outs] == [expected(model, [1, image, 40, 2]) for image in images] * 2


def test_a_rank_that_dies_ends_the_requests_of_all_groups(grouped: LLM) -> None:
    """The last one of these tests: it ends the ranks."""
    streams = [grouped.stream(prompt, max_tokens=300, ignore_eos=True) for prompt in PROMPTS[:2]]
    for stream in streams:
        next(stream)
    ranks = workers_of_this_process()

    os.kill(ranks[1].pid, signal.SIGKILL)

    for _ in range(2):
        with pytest.raises(ServerError, match=r"model worker \d died \(signal 9\); make another LLM"):
            list(grouped.stream(PROMPTS[0], max_tokens=300, ignore_eos=True))
    assert not psutil.wait_procs(ranks, timeout=60)[1]
