"""The simulation of an encoder and a worker on one GPU. The oracle is a load on a card."""

from __future__ import annotations

import numpy as np
import pytest

from benchmark.engine.shared_gpu import COST, KEPT, LOADS, TEXT_TOKENS, ImageLoad, SharedGpu, tower_s


@pytest.mark.parametrize(
    ("name", "rate", "ttft_s", "itl_s"), [("large", 4.98, 1.564, 0.042), ("medium", 19.6, 0.516, 0.030)]
)
def test_its_figures_are_near_those_of_an_h200(name: str, rate: float, ttft_s: float, itl_s: float) -> None:
    """See docs/log/2026-11-19.md."""
    figures = SharedGpu(LOADS[name]).run()

    assert len(figures.ttft_s) == LOADS[name].requests
    assert figures.images / figures.seconds == pytest.approx(rate, rel=0.06)
    assert np.median(figures.ttft_s) == pytest.approx(ttft_s, rel=0.15)
    assert np.quantile(figures.itl_s, 0.99) == pytest.approx(itl_s, rel=0.15)


def test_an_image_alone_is_decoded_then_encoded_then_computed() -> None:
    load = ImageLoad(1, 1, 1_000, 2, 0.05)
    tokens = TEXT_TOKENS + load.tokens

    (ttft_s,) = SharedGpu(load).run().ttft_s

    reckoned_s = load.decode_s + tower_s([load.tokens]) + COST.step_s(tokens, 0, tokens**2 / 2)
    assert ttft_s == pytest.approx(reckoned_s, rel=0.1)


def test_two_users_of_the_gpu_wait_for_each_other() -> None:
    """The second image is encoded while the first prompt is computed: each takes longer, both together do not."""
    load = ImageLoad(2, 2, 4_000, 2, 0.05)

    first_s, second_s = SharedGpu(load).run().ttft_s

    alone_s = SharedGpu(ImageLoad(1, 1, 4_000, 2, 0.05)).run().ttft_s[0]
    assert first_s > 1.2 * alone_s
    assert second_s < 2 * alone_s / KEPT
