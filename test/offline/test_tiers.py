"""An LLM with KV tiers: prefixes that have left the KV pool come back with the same text, and outlive the LLM."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightserve import LLM, AsyncLLM
from lightserve.errors import ServerError
from lightserve.messages.step import Step, StepResult
from lightserve.router.kv.tiers.tiers import KvTiers
from lightserve.worker.rpc import GetResult
from test.api.server import running_server
from test.api.test_ep import save_expert_model
from test.hybrid_model import save_hybrid_model
from test.lora_files import write_adapter
from test.offline.test_ranks import workers_of_this_process
from test.worker.kv.test_windowed_pool import prompt as windowed_prompt, save_model as save_windowed_model

pytestmark = pytest.mark.slow

POOL, LENGTH = 1024, 450  # of the pool, of a prompt: the pool holds two
OPTIONS: dict[str, Any] = {"device": "cpu", "data_type": "float32", "max_total_token_num": POOL, "deterministic": True}
RAM: dict[str, Any] = {"kv_ram_gb": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from test.small_text import save_small_model  # here, because it imports transformers

    return str(save_small_model(tmp_path_factory.mktemp("model"), context_len=POOL))


@pytest.fixture(scope="module")
def alone(folder: str) -> Iterator[LLM]:
    """Without tiers."""
    with LLM(folder, max_loras=1, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiered(folder: str) -> Iterator[LLM]:
    with LLM(folder, max_loras=1, **OPTIONS, **RAM) as llm:
        yield llm


def prompt(number: int) -> list[int]:
    return [3 + (7 * number + i * i) % 90 for i in range(LENGTH)]


def answer(llm: LLM, number: int, **fields: Any) -> list[float]:
    (generation,) = llm.generate([prompt(number)], max_tokens=8, temperature=0, ignore_eos=True, logprobs=1, **fields)
    return generation.logprobs


def tiers_of(llm: LLM) -> list[KvTiers]:
    return [source for group in llm._scheduler.groups for source in group.sources if isinstance(source, KvTiers)]


def loaded(llm: LLM) -> int:
    return sum(tiers.num_loaded for tiers in tiers_of(llm))


def answer_after_eviction(llm: LLM, number: int, expected: list[float], **fields: Any) -> None:
    """Evict a prompt and ask again, until it is loaded: on a loaded machine a load may be late, and is computed."""
    before = loaded(llm)
    for _ in range(20):
        for other in range(10, 14):
            answer(llm, other)
        assert answer(llm, number, **fields) == expected
        if loaded(llm) > before:
            return
    raise AssertionError("the prompt was never loaded")


def test_an_evicted_prompt_is_loaded_with_the_same_text(tiered: LLM, alone: LLM) -> None:
    expected = answer(alone, 0)

    assert answer(tiered, 0) == expected
    answer_after_eviction(tiered, 0, expected)


def test_prompts_of_one_call_are_loaded_beside_others(tiered: LLM, alone: LLM) -> None:
    prompts = [prompt(number) for number in range(6)]
    parameters: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = [one.token_ids for one in alone.generate(prompts, **parameters)]

    for _ in range(3):
        assert [one.token_ids for one in tiered.generate(prompts, **parameters)] == expected


def test_a_prefix_of_an_adapter_is_not_that_of_the_base_model(tiered: LLM, alone: LLM, tmp_path: Path) -> None:
    size = alone.worker.model_config.count("hidden_size")
    sizes = {f"model.layers.{layer}.self_attn.q_proj": (size, size) for layer in range(2)}
    adapter = write_adapter(tmp_path / "adapter", sizes, strength=20.0)
    expected = answer(alone, 1, lora=str(adapter))
    assert expected != answer(alone, 1)

    assert answer(tiered, 1, lora=str(adapter)) == expected
    answer_after_eviction(tiered, 1, expected, lora=str(adapter))
    answer_after_eviction(tiered, 1, answer(alone, 1))


def test_after_an_interrupt_nothing_of_the_lost_steps_is_found(
    tiered: LLM, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, launch, results = answer(alone, 2), tiered._ranks.launch, []

    def interrupted(step: Step) -> GetResult:
        result = launch(step)

        def wait() -> StepResult:
            results.append(result())
            raise KeyboardInterrupt

        return wait

    with monkeypatch.context() as patch:
        patch.setattr(tiered._ranks, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer(tiered, 2)

    assert results
    assert answer(tiered, 2) == expected
    answer_after_eviction(tiered, 2, expected)


def test_prefixes_on_a_disk_outlive_the_llm(folder: str, alone: LLM, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"kv_disk_gb": 0.1, "kv_disk_dir": str(tmp_path / "kv")}
    expected = [answer(alone, number) for number in range(2)]
    with LLM(folder, **OPTIONS, **RAM, **disk) as first:
        assert [answer(first, number) for number in range(2)] == expected

    for _ in range(20):  # a load may be late
        with LLM(folder, **OPTIONS, **RAM, **disk) as second:
            assert [answer(second, number) for number in range(2)] == expected
            if loaded(second):
                return
    raise AssertionError("no prompt was loaded")


@pytest.mark.tp
@pytest.mark.long
@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}])
def test_ranks_load_prompts_until_one_dies(folder: str, ranks: dict[str, int], tmp_path: Path) -> None:
    disk: dict[str, Any] = {"kv_disk_gb": 0.1, "kv_disk_dir": str(tmp_path / "kv")}
    options = OPTIONS | ranks
    with LLM(folder, **options) as plain:
        expected = answer(plain, 3)
    with LLM(folder, **options, **RAM, **disk) as llm:
        assert answer(llm, 3) == expected
        answer_after_eviction(llm, 3, expected)
    with LLM(folder, **options, **RAM, **disk) as llm:  # from the disk
        answer_after_eviction(llm, 3, expected)
        workers = workers_of_this_process()
        stream = llm.stream([prompt(3)], max_tokens=300, ignore_eos=True)
        next(stream)
        os.kill(workers[1].pid, signal.SIGKILL)

        with pytest.raises(ServerError, match=r"model worker \d died \(signal 9\); make another LLM"):
            list(stream)
    assert not psutil.wait_procs(workers, timeout=60)[1]
    with LLM(folder, **options, **RAM, **disk) as llm:
        answer_after_eviction(llm, 3, expected)


@pytest.mark.long
def test_a_server_finds_what_an_llm_has_written(folder: str, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"kv_disk_gb": 0.1, "kv_disk_dir": str(tmp_path / "kv")}
    with LLM(folder, **OPTIONS, **RAM, **disk) as llm:
        expected = answer(llm, 0)
    options = {"model_dir": folder, **OPTIONS, **RAM, **disk}
    flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    body = {"prompt": prompt(0), "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}

    for _ in range(20):  # a load may be late
        with running_server(tmp_path / "log", *flags) as server:
            _, response = server.post("/v1/completions", body)
        assert response["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-5)
        if response["usage"]["prompt_tokens_details"]["cached_tokens"]:
            return
    raise AssertionError("the prompt was never loaded")


@pytest.mark.long
def test_tasks_of_an_event_loop_wait_for_loads(folder: str, alone: LLM) -> None:
    parameters: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    prompts = [prompt(number) for number in range(6)]
    expected = [one.token_ids for one in alone.generate(prompts, **parameters)]

    async def generated() -> list[list[list[int]]]:
        async with AsyncLLM(folder, **OPTIONS, **RAM) as llm:
            rounds = []
            for _ in range(3):
                calls = (llm.generate([one], **parameters) for one in prompts)
                rounds.append([generation.token_ids for [generation] in await asyncio.gather(*calls)])
            return rounds

    assert asyncio.run(generated()) == [expected] * 3


@pytest.mark.tp
@pytest.mark.long
def test_both_attention_groups_load_their_prompts(tmp_path: Path) -> None:
    """Each pool holds five of these prompts."""
    folder = save_expert_model(tmp_path)
    options: dict[str, Any] = {"device": "cpu", "data_type": "float32", "max_total_token_num": 1100}
    prompts = [[(5 + number + 7 * i) % 131 for i in range(200)] for number in range(14)]
    parameters: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with LLM(folder, **options) as plain:
        expected = [one.token_ids for one in plain.generate(prompts, **parameters)]

    with LLM(folder, tp=2, ep=2, enable_dp_attention=True, **options, **RAM) as llm:
        for _ in range(20):  # a load may be late
            assert [one.token_ids for one in llm.generate(prompts, **parameters)] == expected
            if all(tiers.num_loaded for tiers in tiers_of(llm)):
                return
    raise AssertionError("a group has loaded nothing")


def windowed(folder: Path) -> tuple[str, dict[str, Any]]:
    return save_windowed_model("gemma3_text", folder), {"max_windowed_token_num": 400}


def recurrent(folder: Path) -> tuple[str, dict[str, Any]]:
    return save_hybrid_model(folder)[0], {"max_state_rows": 12}


@pytest.mark.long
@pytest.mark.parametrize("make_model", [windowed, recurrent])
def test_windows_and_states_come_back_from_a_disk(
    make_model: Callable[[Path], tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, pools = make_model(tmp_path)
    options: dict[str, Any] = {
        "device": "cpu",
        "data_type": "float32",
        "max_total_token_num": 1024,
        "max_req_total_len": 600,
        **pools,
    }
    tiers: dict[str, Any] = {"kv_ram_gb": 0.02, "kv_disk_gb": 0.1, "kv_disk_dir": str(tmp_path / "kv")}
    prompts = [windowed_prompt(250, seed=seed) for seed in range(6)]
    parameters: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with LLM(folder, **options) as plain:
        expected = [one.token_ids for one in plain.generate(prompts, **parameters)]
    with LLM(folder, **options, **tiers) as llm:
        for _ in range(3):
            assert [one.token_ids for one in llm.generate(prompts, **parameters)] == expected

    for _ in range(20):  # a load may be late
        with LLM(folder, **options, **tiers) as llm:
            assert [one.token_ids for one in llm.generate(prompts, **parameters)] == expected
            if loaded(llm):
                return
    raise AssertionError("no prompt was loaded")
