"""What memory and its sharing may not change: the text. On a tiny model, on whatever device this machine has."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from lightserve.messages.params import GenerationParams
from lightserve.messages.step import Step
from lightserve.offline.llm import LLM
from lightserve.worker.rpc import GetResult
from test.models.tiny import build_hf

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny-llama")
    hf = build_hf("llama-gqa")
    hf.config.max_position_embeddings = 256
    hf.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w0"))
    tokenizer.save(str(path / "tokenizer.json"))
    return str(path)


def make(folder: str, device: str, num_tokens: int) -> LLM:
    return LLM(
        folder,
        device=device,
        data_type="float32",
        max_total_token_num=num_tokens,
        max_req_total_len=256,
        running_max_req_size=50,
        batch_max_tokens=128,
    )


def sampling(seed: int, count: int) -> GenerationParams:
    is_greedy = seed % 2 == 0
    return GenerationParams.of(
        max_new_tokens=count,
        temperature=0.0 if is_greedy else 0.8,
        seed=seed,
        ignore_eos=True,
        repetition_penalty=1.2 if seed % 3 == 0 else 1.0,
        min_new_tokens=count // 2,
    )


@pytest.mark.parametrize("device", DEVICES)
def test_preempted_requests_generate_the_same_text(folder: str, device: str) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(128) for _ in range(rng.randint(3, 30))] for _ in range(50)]
    wanted = [sampling(i, rng.randint(150, 200)) for i in range(50)]
    small, large = make(folder, device, 600), make(folder, device, 50 * 256)
    for llm in (small, large):
        llm.generate(
            [[i] for i in range(40)], GenerationParams.of(max_new_tokens=4, ignore_eos=True)
        )  # a wrong idea of what comes

    preempted = small.generate(prompts, wanted)
    undisturbed = large.generate(prompts, wanted)

    assert small._scheduler.num_preemptions > 10
    assert large._scheduler.num_preemptions == 0
    assert [one.token_ids for one in preempted] == [one.token_ids for one in undisturbed]
    assert small._scheduler.only_group.pool.used == 0


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_cached_changes_no_text(folder: str, device: str) -> None:
    llm = make(folder, device, 4000)
    system = [i % 128 for i in range(7, 107)]
    prompts = [[*system, i, i + 1] for i in range(8)]
    wanted = [sampling(i, 12) for i in range(8)]
    alone = [
        make(folder, device, 4000).generate([prompt], one)[0].token_ids
        for prompt, one in zip(prompts, wanted, strict=True)
    ]

    first = llm.generate(prompts, wanted)
    again = llm.generate(prompts, wanted)

    assert [one.token_ids for one in first] == alone
    assert [one.token_ids for one in again] == alone
    assert llm._scheduler.only_group.pool.cached_tokens >= 100


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("failing_step", [1, 2, 3])
def test_a_prompt_generates_the_same_text_after_its_step_failed(
    folder: str, device: str, error: type[BaseException], failing_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(folder, device, 4000)
    system = [i % 128 for i in range(7, 107)]
    prompts = [[*system, *range(i, i + 100)] for i in range(3)]  # more than a step computes
    expected = [one.token_ids for one in make(folder, device, 4000).generate(prompts, sampling(0, 12))]
    cached = llm.generate([system], sampling(0, 1))[0].token_ids
    launch, steps = llm.worker.launch, []

    def fail_at_last(step: Step) -> GetResult:
        steps.append(step)
        if len(steps) == failing_step:
            raise error
        return launch(step)

    with monkeypatch.context() as broken:
        broken.setattr(llm.worker, "launch", fail_at_last)
        with pytest.raises(error):
            llm.generate(prompts, sampling(0, 12))

    assert [one.token_ids for one in llm.generate(prompts, sampling(0, 12))] == expected
    assert llm.generate([system], sampling(0, 1))[0].token_ids == cached
    assert llm._scheduler.only_group.pool.used == 0
    assert llm.worker.model.req_manager.num_free >= 50 - 3
