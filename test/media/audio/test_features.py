"""The features of sounds. The oracle is transformers, and for other rates the formula of a windowed sinc."""

from __future__ import annotations

import math

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from lightserve.media.audio.log_mel import LogMel
from lightserve.media.audio.resample import num_resampled, resampled
from lightserve.model_files.config.images import ImageFiles
from test.media.audio.sounds import Samples, tone

FILES = {"feature_size": 128, "sampling_rate": 16_000, "hop_length": 160, "n_fft": 400, "chunk_length": 3}
LOG_MEL = LogMel.read(ImageFiles("qwen2_audio", FILES, {}))
EXTRACTOR = WhisperFeatureExtractor(**FILES)
SILENCE = np.zeros(4000, dtype=np.float32)


@pytest.mark.parametrize(
    "samples",
    [
        *(tone(seconds, seed=number) for number, seconds in enumerate((0.01, 0.5, 1.234, 2.99, 3.0, 4.0))),
        tone(0.3)[:1],
        tone(0.3)[:161],
        SILENCE,
        np.concatenate((SILENCE, tone(0.5), SILENCE)),
    ],
)
def test_features_are_those_of_transformers(samples: Samples) -> None:
    expected = EXTRACTOR(samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="np")
    frames = int(expected["attention_mask"].sum())

    found = LOG_MEL.features(samples)

    assert LOG_MEL.frames_of(len(samples)) == frames
    assert len(found) == min(frames + 2, 300)
    np.testing.assert_allclose(found, expected["input_features"][0].T[: len(found)], rtol=0, atol=1e-4)


@pytest.mark.parametrize("mels", [80, 128])
def test_filters_are_those_of_transformers(mels: int) -> None:
    from lightserve.media.audio.log_mel import mel_filters

    expected = WhisperFeatureExtractor(feature_size=mels).mel_filters

    np.testing.assert_allclose(mel_filters(mels, 400, 16_000), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 15_999])
def test_other_rates_are_resampled_by_a_windowed_sinc(rate: int) -> None:
    samples = tone(0.05, rate)
    band = min(rate, 16_000) * 0.99
    numbers = np.arange(len(samples))

    found = resampled(samples, rate, 16_000)

    assert len(found) == num_resampled(len(samples), rate, 16_000) == math.ceil(len(samples) * 16_000 / rate)
    for place in (0, 1, 17, len(found) // 2, len(found) - 1):
        distance = (numbers / rate - place / 16_000) * band
        weights = np.sinc(distance) * np.cos(distance * math.pi / 12) ** 2 * (abs(distance) < 6) * band / rate
        assert abs(found[place] - samples @ weights) < 1e-5


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_a_sine_stays_what_it_is(rate: int) -> None:
    times = np.arange(rate // 4) / rate

    found = resampled(np.sin(2 * np.pi * 440 * times).astype(np.float32), rate, 16_000)

    expected = np.sin(2 * np.pi * 440 * np.arange(len(found)) / 16_000)
    assert abs(found - expected)[100:-100].max() < 5e-3


def test_what_the_lower_rate_cannot_hold_is_removed() -> None:
    times = np.arange(12_000) / 48_000

    found = resampled(np.sin(2 * np.pi * 12_000 * times).astype(np.float32), 48_000, 16_000)

    assert abs(found[100:-100]).max() < 1e-2
