"""An LLM whose ranks are processes of their own: texts, adapters, interrupts, a rank that dies, closing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from lightserve import LLM, AsyncLLM
from lightserve.errors import InvalidRequestError, ServerError
from lightserve.messages.step import Step, StepResult
from lightserve.worker.rpc import GetResult
from test.lora_files import write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.tp]

PROMPTS = ["abc 12", "xyz", "true"]
OPTIONS: dict[str, Any] = {"device": "cpu", "data_type": "float32", "max_total_token_num": 800, "max_loras": 1}


def texts(llm: LLM, **parameters: Any) -> list[list[int]]:
    generations = llm.generate(PROMPTS, max_tokens=12, ignore_eos=True, **parameters)
    return [generation.token_ids for generation in generations]


def workers_of_this_process() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "lightserve.worker.main" in " ".join(child.cmdline())]


@pytest.fixture(scope="module")
def alone(small_folder: str) -> Iterator[LLM]:
    with LLM(small_folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, alone: LLM) -> str:
    size = alone.worker.model_config.count("hidden_size")
    sizes = {f"model.layers.{layer}.self_attn.q_proj": (size, size) for layer in range(2)}
    return str(write_adapter(tmp_path_factory.mktemp("adapter"), sizes, strength=20.0))


@pytest.fixture(scope="module", params=["tensor_parallel_size", "pipeline_parallel_size"])
def divided(small_folder: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(small_folder, **OPTIONS | {request.param: 2}) as llm:
        assert len(workers_of_this_process()) == 2
        yield llm
    assert not workers_of_this_process()


def test_ranks_generate_the_texts_of_one(divided: LLM, alone: LLM) -> None:
    assert texts(divided, temperature=0) == texts(alone, temperature=0)
    assert texts(divided, temperature=1.0, seed=7, n=2) == texts(alone, temperature=1.0, seed=7, n=2)
    assert texts(divided, temperature=0, regex="[0-9]+") == texts(alone, temperature=0, regex="[0-9]+")


def test_every_rank_has_the_adapters(divided: LLM, alone: LLM, adapter: str) -> None:
    expected = texts(alone, temperature=0, lora=adapter)

    assert texts(divided, temperature=0, lora=adapter) == expected != texts(alone, temperature=0)
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        divided.generate("a", lora="/nowhere")


def test_ranks_free_the_requests_of_a_call_that_was_interrupted(
    divided: LLM, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = divided._ranks.launch

    def interrupted(step: Step) -> GetResult:
        launch(step)

        def wait() -> StepResult:
            raise KeyboardInterrupt

        return wait

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(divided._ranks, "launch", interrupted)
            with pytest.raises(KeyboardInterrupt):
                texts(divided, temperature=0)

    assert texts(divided, temperature=0) == texts(alone, temperature=0)
    assert divided._scheduler.only_group.pool.used == 0


def test_the_model_of_several_ranks_is_not_in_this_process(divided: LLM) -> None:
    with pytest.raises(ServerError, match="the model is in 2 other processes"):
        _ = divided.worker


def test_a_rank_that_dies_ends_all_requests_with_its_name(divided: LLM) -> None:
    """The last one of these tests: it ends the ranks."""
    stream = divided.stream("abc", max_tokens=300, ignore_eos=True)
    next(stream)
    ranks = workers_of_this_process()

    os.kill(ranks[1].pid, signal.SIGKILL)

    with pytest.raises(ServerError, match=r"model worker \d died \(signal 9\); make another LLM"):
        list(stream)
    with pytest.raises(ServerError, match=r"model worker \d died \(signal 9\); make another LLM"):
        divided.generate("abc")
    assert not psutil.wait_procs(ranks, timeout=60)[1]


@pytest.mark.long
def test_ranks_that_cannot_start_say_why(small_folder: str) -> None:
    with pytest.raises(ServerError, match=r"model worker \d died .*max_total_token_num"):
        LLM(small_folder, tp=2, **OPTIONS | {"max_total_token_num": 10**13})

    assert not workers_of_this_process()


@pytest.mark.long
def test_tasks_of_an_event_loop_share_the_ranks(small_folder: str, alone: LLM) -> None:
    async def generated() -> list[list[int]]:
        async with AsyncLLM(small_folder, tp=2, **OPTIONS) as llm:
            calls = (llm.generate(prompt, max_tokens=12, ignore_eos=True, temperature=0) for prompt in PROMPTS)
            return [generation.token_ids for [generation] in await asyncio.gather(*calls)]

    assert asyncio.run(generated()) == texts(alone, temperature=0)
    assert not workers_of_this_process()


@pytest.mark.long
def test_ranks_end_with_a_program_that_forgets_to_close(small_folder: str) -> None:
    program = f"""
import psutil
from lightserve import LLM
if __name__ == "__main__":
    llm = LLM({small_folder!r}, tp=2, device="cpu", max_total_token_num=800)
    print(len(llm.generate("abc", max_tokens=3)[0].token_ids), *[c.pid for c in psutil.Process().children()])
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    count, *pids = map(int, done.stdout.split())

    assert count == 3
    assert len(pids) >= 2
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
