"""Long sounds are divided where they are quiet."""

from __future__ import annotations

import numpy as np
import pytest

from lightserve.media.audio.split import parts_of
from lightserve.media.audio.wav import decode
from test.media.audio.sounds import tone, wav


def test_a_short_sound_stays_whole() -> None:
    file = wav(tone(3.0))

    assert parts_of(file, 3.0) == [file]


@pytest.mark.parametrize(("rate", "bits"), [(16_000, 16), (8_000, 24), (44_100, 8)])
@pytest.mark.parametrize("seconds", [3.00002, 3.05, 7.3, 30.0])
def test_the_parts_of_a_sound_have_all_its_samples(rate: int, bits: int, seconds: float) -> None:
    file = wav(np.stack((tone(seconds, rate), tone(seconds, rate, seed=1)), axis=1), rate, bits)

    parts = [decode(part) for part in parts_of(file, 3.0)]

    assert {part_rate for _, part_rate in parts} == {rate}
    assert all(0.1 * rate <= len(samples) + 1 <= 3.0 * rate + 1 for samples, _ in parts)
    np.testing.assert_array_equal(np.concatenate([samples for samples, _ in parts]), decode(file)[0])


def test_a_border_is_where_it_is_quiet() -> None:
    samples = tone(20.0)
    samples[16_000 * 8 : 16_000 * 8 + 3200] = 0

    first, *_ = parts_of(wav(samples), 10.0)

    assert 8.0 <= len(decode(first)[0]) / 16_000 <= 8.2
