"""Models with windows whose windowed layers have a KV pool of their own: the same tokens as with one pool.

Slots of the windowed pool that the router has freed are filled with NaN, so that reading one of them shows in the text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM

from lightserve.errors import ServerError
from lightserve.messages.params import GenerationParams
from lightserve.messages.step import Step
from lightserve.offline.llm import LLM
from lightserve.router.kv.sliding_window import SlidingWindowPool
from lightserve.text.beam_search import BeamParams
from lightserve.worker.rpc import GetResult

WINDOW, MAX_LEN = 16, 600
SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_LEN,
    "sliding_window": WINDOW,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3_text": {**SMALL, "num_hidden_layers": 3, "head_dim": 16, "sliding_window_pattern": 3},
    "mistral": {**SMALL, "num_hidden_layers": 2},  # all layers have the window
    "gemma4_text": {  # layers that read the caches of others, in both pools
        **SMALL,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
        "num_kv_shared_layers": 2,
        "head_dim": 16,
        "global_head_dim": 24,
        "vocab_size_per_layer_input": 131,
        "hidden_size_per_layer_input": 8,
    },
    "gpt_oss": {**SMALL, "num_hidden_layers": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}
KEPT = WINDOW - 1 + 64
PARAMS = GenerationParams.of(max_new_tokens=25, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", params=CONFIGS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(request.param, tmp_path_factory.mktemp(request.param))


def save_model(model_type: str, path: Path) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **CONFIGS[model_type])).float()
    for weight in model.state_dict().values():
        weight.normal_(std=0.15)
    model.save_pretrained(path)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w0")).save(str(path / "tokenizer.json"))
    return str(path)


def make(model_dir: str, windowed: int, tokens: int = 4000, **options: Any) -> LLM:
    llm = LLM(
        model_dir,
        device="cpu",
        data_type="float32",
        max_total_token_num=tokens,
        max_windowed_token_num=windowed,
        **{"running_max_req_size": 4, "batch_max_tokens": 100, **options},
    )
    if windowed:
        FreedSlotsHoldNan(llm)
    return llm


class FreedSlotsHoldNan:
    """A step may read slots that are let go when it is planned. So these are filled before the next step."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._launch = llm.worker.launch
        memory = llm.worker.model.mem_manager
        groups = enumerate(memory.layout.groups)
        windowed = [i for i, group in groups if group.window is not None]
        self._buffers = [memory.scale_buffers.get(i, memory.buffers[i]) for i in windowed]  # integers have no NaN
        self._free = torch.arange(sum(memory.group_sizes))
        llm.worker.launch = self.launch  # type: ignore[method-assign]

    def launch(self, step: Step) -> GetResult:
        for buffer in self._buffers:
            buffer[:, self._free] = float("nan")
        (windowed,) = self._llm._scheduler.only_group.pool.groups
        assert isinstance(windowed, SlidingWindowPool)
        self._free = torch.from_numpy(~windowed.slots._slots._is_used).nonzero().flatten()
        return self._launch(step)


def prompt(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def tokens_of(llm: LLM, prompts: list[list[int]], params: GenerationParams = PARAMS) -> list[list[int]]:
    generations = llm.generate(prompts, params)
    assert all(one.error is None for one in generations)
    return [one.token_ids for one in generations]


def assert_idle(llm: LLM) -> None:
    """Used slots are cached slots, in both pools."""
    pool = llm._scheduler.only_group.pool
    assert pool.used == 0
    assert [group.used for group in pool.groups] == [0]


def test_text_is_the_same_with_one_pool_and_with_two(model_dir: str) -> None:
    """Prompts in chunks, requests side by side, and turns of a chat that continue cached prefixes."""
    one, two = make(model_dir, 0), make(model_dir, 600)
    prompts = [prompt(n, seed=n) for n in (300, 150, 20, 1, 90)]
    assert not one.worker.kv_groups
    assert len(two.worker.kv_groups) == 1

    expected, found = tokens_of(one, prompts), tokens_of(two, prompts)
    turns = [[*ids, *answer, *prompt(30, seed=7)] for ids, answer in zip(prompts, expected, strict=True)]
    cut = [ids[: len(ids) // 2] + prompt(5, seed=8) for ids in prompts]

    assert found == expected
    assert tokens_of(two, turns) == tokens_of(one, turns)
    assert tokens_of(two, cut) == tokens_of(one, cut)
    assert_idle(two)


def test_text_is_the_same_with_quantised_kv_in_one_pool_and_in_two(model_dir: str) -> None:
    one, two = make(model_dir, 0, kv_dtype="int8"), make(model_dir, 300, kv_dtype="int8")
    prompts = [prompt(200), prompt(200)[:150] + prompt(20, seed=1)]

    assert tokens_of(two, prompts) == tokens_of(one, prompts)
    assert_idle(two)


def test_text_is_the_same_if_the_windowed_pool_holds_little_more_than_one_window(model_dir: str) -> None:
    """Cached prefixes lose their slots all the time, and requests wait for others."""
    one, two = make(model_dir, 0), make(model_dir, KEPT + 10)
    prompts = [prompt(200, seed=n % 2) + prompt(20, seed=n) for n in range(4)]

    assert tokens_of(two, prompts) == tokens_of(one, prompts)
    assert tokens_of(two, prompts) == tokens_of(one, prompts)
    assert_idle(two)


def test_text_is_the_same_after_preemptions(model_dir: str) -> None:
    one, two = make(model_dir, 0), make(model_dir, 500)
    prompts = [prompt(150, seed=n) for n in range(3)]
    expected = tokens_of(one, prompts)

    found: list[list[int]] = [[], [], []]
    for count, out in enumerate(two.stream(prompts, PARAMS)):
        found[out.index].append(out.token_id or 0)
        if count % 10 == 9 and two._scheduler.num_running > 1:
            two._scheduler.only_group.preemption.preempt_newest()

    assert found == expected
    assert two._scheduler.num_preemptions > 3
    assert_idle(two)


def test_choices_and_seeds_are_the_same_with_two_pools(model_dir: str) -> None:
    one, two = make(model_dir, 0), make(model_dir, 800)
    params = [GenerationParams.of(max_new_tokens=30, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(4)]

    expected, found = ([g.token_ids for g in llm.generate([prompt(180)] * 4, params)] for llm in (one, two))

    assert found == expected


def test_beams_are_the_same_with_two_pools(model_dir: str) -> None:
    params = BeamParams(num_beams=3, n=3, max_new_tokens=8)

    one, two = (make(model_dir, size).beam_search([prompt(120)], params) for size in (0, 500))

    assert [beam.token_ids for beam in two[0]] == [beam.token_ids for beam in one[0]]


def test_requests_that_the_worker_puts_next_to_each_other_keep_their_windowed_slots(model_dir: str) -> None:
    """Requests that share a long prefix are neighbours in a decode step, in another order than in the command."""
    options = {"running_max_req_size": 20, "batch_max_tokens": 500}
    one, two = make(model_dir, 0, 9000, **options), make(model_dir, 2500, 9000, **options)
    prompts = [prompt(280, seed=n % 2) + prompt(3, seed=n) for n in range(18)]
    params = GenerationParams.of(max_new_tokens=4, temperature=0, ignore_eos=True)

    assert tokens_of(two, prompts, params) == tokens_of(one, prompts, params)


def test_the_logits_of_a_deterministic_server_do_not_depend_on_the_pools(model_dir: str) -> None:
    prompts = [prompt(200), prompt(200) + prompt(40, seed=3)]
    params = GenerationParams.of(max_new_tokens=10, temperature=0, ignore_eos=True, logprobs=2)

    outs = [make(model_dir, size, deterministic=True).generate(prompts, params) for size in (0, 300)]

    assert [one.logprobs for one in outs[1]] == [one.logprobs for one in outs[0]]


def test_two_pools_hold_more_tokens_in_the_same_memory(model_dir: str) -> None:
    one, two = make(model_dir, 0, 2000), make(model_dir, 250, 2000)

    sizes = [sum(buffer.nbytes for buffer in llm.worker.model.mem_manager.buffers) for llm in (one, two)]

    layout = two.worker.model.kv_layout
    saved = 1750 * layout.windowed_bytes_per_token
    assert sizes[0] - sizes[1] == saved
    assert saved > 0.4 * sizes[0]


def test_warm_up_runs_on_both_pools(model_dir: str) -> None:
    llm = make(model_dir, 100, 500)

    llm.worker.warm_up()

    assert tokens_of(llm, [prompt(120)]) == tokens_of(make(model_dir, 0, 500), [prompt(120)])


def test_a_windowed_pool_that_cannot_hold_a_window_is_refused(model_dir: str) -> None:
    with pytest.raises(ServerError, match=f"max_windowed_token_num={KEPT}: it must be above {KEPT}"):
        make(model_dir, KEPT)
    with pytest.raises(ServerError, match="at most the 4000 tokens of the KV pool; 0: one pool"):
        make(model_dir, 4001)
