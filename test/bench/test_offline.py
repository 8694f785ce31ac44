"""The offline benchmark must compute what it says it measures."""

from __future__ import annotations

import pytest

from lightserve.bench.offline import Load, measure


def test_no_run_repeats_a_prompt_that_the_prefix_cache_could_serve() -> None:
    prompts: list[tuple[int, ...]] = []

    def run(batch: list[list[int]], new_tokens: int) -> float:
        prompts.extend(map(tuple, batch))
        return float(new_tokens)

    measure({"ours": run}, Load(batch=4, prompt_len=16, new_tokens=9, repeats=3))

    assert len(prompts) == 4 * 2 * (3 + 1)
    assert len({prompt[:4] for prompt in prompts}) == len(prompts)


def test_both_engines_get_the_same_prompts_and_the_best_repeat_counts() -> None:
    seen: dict[str, list[list[list[int]]]] = {"ours": [], "theirs": []}

    def timed(name: str, prefill_s: float, token_s: float) -> object:
        def run(batch: list[list[int]], new_tokens: int) -> float:
            seen[name].append(batch)
            is_slow = len(seen[name]) <= 4  # the warm-up and the first repeat
            return (prefill_s + token_s * (new_tokens - 1)) * (2 if is_slow else 1)

        return run

    runs = {"ours": timed("ours", 0.1, 0.01), "theirs": timed("theirs", 0.2, 0.02)}
    speeds = measure(runs, Load(batch=2, prompt_len=50, new_tokens=11, repeats=2))  # type: ignore[arg-type]

    assert seen["ours"] == seen["theirs"]
    assert speeds["ours"].prefill == pytest.approx(2 * 50 / 0.1)
    assert speeds["theirs"].decode == pytest.approx(2 * 10 / 0.2)
