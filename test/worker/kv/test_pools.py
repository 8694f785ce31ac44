"""How memory is divided between the pool of all tokens and the windowed pool."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightserve.common.kv.layout import KvGroup, KvLayout
from lightserve.errors import ServerError
from lightserve.worker.kv.pools import KvSizes, WindowedSizing, kept_tokens

GB = 10**9
MOST = 2**24


def layout(full: int, windowed: int, window: int, heads: int = 8, dim: int = 128) -> KvLayout:
    """``full`` layers that see all tokens, and ``windowed`` layers."""
    groups = []
    if full:
        groups.append(KvGroup(tuple(range(full)), heads, dim, dim, torch.bfloat16))
    groups.append(KvGroup(tuple(range(full, full + windowed)), heads, dim, dim, torch.bfloat16, window=window))
    return KvLayout(tuple(groups))


GEMMA3_27B = layout(10, 52, window=1024, heads=16)
GPT_OSS_20B = layout(12, 12, window=128, dim=64)
MISTRAL_7B = layout(0, 32, window=4096)
COHERE2_7B = layout(8, 24, window=4096)
GEMMA2_9B = layout(21, 21, window=4096, dim=256)


def bytes_of(layout: KvLayout, sizes: KvSizes) -> int:
    windowed_bytes = layout.windowed_bytes_per_token
    windowed = sum(sizes.groups) or sizes.tokens
    return sizes.tokens * (layout.bytes_per_token - windowed_bytes) + windowed * windowed_bytes


@pytest.mark.parametrize(
    ("layout", "max_len", "gain"),
    [
        (GEMMA3_27B, 131_072, 3.8),
        (GPT_OSS_20B, 131_072, 1.7),
        (MISTRAL_7B, 32_768, 1.9),
        (COHERE2_7B, 131_072, 2.8),
    ],
)
def test_two_pools_take_the_memory_of_one_and_hold_more_tokens(layout: KvLayout, max_len: int, gain: float) -> None:
    budget = 60 * GB
    single = budget // layout.bytes_per_token

    sizes = WindowedSizing(layout, max_len, step_tokens=8192).for_budget(budget, MOST)

    (windowed,) = sizes.groups
    assert 0.99 * budget < bytes_of(layout, sizes) <= budget
    assert sizes.tokens / single == pytest.approx(gain, abs=0.1)
    windows = windowed / kept_tokens(layout.window or 0)
    assert windows * max_len / 4 >= 0.99 * sizes.tokens  # contexts of a quarter of the longest request fill both pools


@pytest.mark.parametrize(
    ("layout", "max_len"),
    [
        (GEMMA2_9B, 8192),  # a window is half of the longest request
        (GEMMA3_27B, 1024),  # no window hides a token
        (layout(30, 2, window=512), 131_072),  # the windowed layers are a small share
    ],
)
def test_one_pool_is_kept_if_a_second_one_saves_little(layout: KvLayout, max_len: int) -> None:
    sizing = WindowedSizing(layout, max_len, step_tokens=2048)

    assert sizing.for_budget(60 * GB, MOST) == KvSizes(60 * GB // layout.bytes_per_token)
    assert sizing.for_tokens(100_000) == KvSizes(100_000)


def test_one_pool_is_kept_if_memory_holds_few_requests() -> None:
    budget = 10_000 * GEMMA3_27B.bytes_per_token

    assert WindowedSizing(GEMMA3_27B, 131_072, step_tokens=8192).for_budget(budget, MOST) == KvSizes(10_000)


def test_a_pool_of_the_operators_size_gets_a_windowed_pool_that_saves_memory() -> None:
    sizing = WindowedSizing(GEMMA3_27B, 131_072, step_tokens=2048)

    assert sizing.for_tokens(400_000) == KvSizes(400_000, (50_000,))
    assert sizing.for_tokens(3_000) == KvSizes(3_000)  # one window and one step already take as much


def test_the_operator_sets_the_windowed_pool() -> None:
    sizing = WindowedSizing(GEMMA3_27B, 131_072, step_tokens=2048, wanted=20_000)

    assert sizing.for_tokens(100_000) == KvSizes(100_000, (20_000,))
    sizes = sizing.for_budget(60 * GB, MOST)
    assert sizes.groups == (20_000,)
    assert 0.99 * 60 * GB < bytes_of(GEMMA3_27B, sizes) <= 60 * GB


def test_the_operator_may_want_one_pool() -> None:
    sizing = WindowedSizing(GEMMA3_27B, 131_072, step_tokens=2048, wanted=0)

    assert sizing.for_tokens(100_000) == KvSizes(100_000)
    assert sizing.for_budget(60 * GB, MOST) == KvSizes(60 * GB // GEMMA3_27B.bytes_per_token)


def test_a_tiny_model_has_no_more_slots_than_the_router_can_count() -> None:
    for tiny in (layout(1, 5, window=16, heads=1, dim=16), layout(0, 5, window=16, heads=1, dim=16)):
        sizes = WindowedSizing(tiny, 4096, step_tokens=100).for_budget(60 * GB, 10_000)
        assert sizes == KvSizes(10_000)  # a single pool holds as many


@pytest.mark.parametrize("wanted", [1, 1024 - 1 + 64, 100_001])
def test_a_windowed_pool_that_cannot_work_is_refused(wanted: int) -> None:
    sizing = WindowedSizing(GEMMA3_27B, 131_072, step_tokens=2048, wanted=wanted)

    with pytest.raises(ServerError, match=f"max_windowed_token_num={wanted}: it must be above 1087"):
        sizing.for_tokens(100_000)


class Stages:
    """Two pipeline stages that compare numbers, each in a thread."""

    def __init__(self) -> None:
        self._values: list[int] = []
        self._lock = threading.Lock()
        self._is_full = threading.Barrier(2, timeout=60)
        self._is_read = threading.Barrier(2, timeout=60)

    def least(self, value: int) -> int:
        with self._lock:
            self._values.append(value)
        self._is_full.wait()
        least = min(self._values)
        if self._is_read.wait() == 0:
            self._values = []
        self._is_full.wait()
        return least


@pytest.mark.parametrize("first", [4, 8, 20], ids=["windows in both", "no window in the second", "more layers"])
@pytest.mark.parametrize("wanted", [None, 0, 20_000])
def test_stages_with_other_layers_and_memory_have_the_same_sizes(first: int, wanted: int | None) -> None:
    """The layers with windows come first."""
    whole = KvLayout(
        (
            KvGroup(tuple(range(8)), 8, 128, 128, torch.bfloat16, window=1024),
            KvGroup(tuple(range(8, 24)), 8, 128, 128, torch.bfloat16),
        )
    )
    layouts = [whole.of_layers(range(first)), whole.of_layers(range(first, 24))]
    budgets = [20 * GB, 30 * GB]
    stages = Stages()

    def size(number: int) -> KvSizes:
        sizing = WindowedSizing(whole, 131_072, 2048, wanted, layouts[number], stages.least)
        return sizing.for_budget(budgets[number], MOST)

    with ThreadPoolExecutor(2) as threads:
        sizes, other = threads.map(size, range(2))

    assert sizes == other
    assert wanted is None or sum(sizes.groups) == wanted
    used = [bytes_of(layout, sizes) / budget for layout, budget in zip(layouts, budgets, strict=True)]
    assert 0.95 <= max(used) <= 1
