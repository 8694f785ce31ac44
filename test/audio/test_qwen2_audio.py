"""The layout and the tower of Qwen2-Audio. The oracle is transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightserve.errors import InvalidRequestError
from lightserve.media.audio.qwen2_audio import Qwen2AudioSounds
from lightserve.media.audio.wav import read_header
from lightserve.media.layout import ImageLayout, read_layout
from lightserve.model_files.config.images import read_image_files
from lightserve.model_files.source import resolve
from lightserve.vision.load import load_tower
from lightserve.vision.tower import ImageTiles
from test.audio_model import SECONDS, embeddings, num_tokens, processed, save_audio_model
from test.media.audio.sounds import Samples, tone, wav

LENGTHS = (0.03, 0.5, 0.507, 1.234, 2.5, 2.995, 3.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("audio")
    return folder, save_audio_model(folder)[1]


def layout_of(folder: Path) -> ImageLayout:
    return read_layout(read_image_files(resolve(str(folder))), None)


def tiles_of(layout: ImageLayout, samples: Samples) -> ImageTiles:
    file = wav(samples, bits=32, is_float=True)
    size = layout.sound_size_of(read_header(file))
    features = [each for sound in layout.opened(file, ()) for each in layout.pixels(sound, size.height, size.width)]
    return ImageTiles([torch.tensor(each) for each in features], size.height, size.width)


def test_embeddings_are_those_of_transformers_in_any_batch(saved: tuple[Path, Any]) -> None:
    folder, model = saved
    layout = layout_of(folder)
    tower = load_tower(resolve(str(folder)), layout, True, torch.float32, torch.device("cpu"))
    sounds = [tone(seconds, seed=number) for number, seconds in enumerate(LENGTHS)]
    inputs = [tiles_of(layout, samples) for samples in sounds]
    expected = [embeddings(model, samples) for samples in sounds]
    together = tower.encode(inputs)

    assert [len(each) for each in together] == [layout.sound_size_of(read_header(wav(each))).tokens for each in sounds]
    for number, (rows, wanted) in enumerate(zip(together, expected, strict=True)):
        torch.testing.assert_close(rows, wanted, rtol=0, atol=2e-4)
        torch.testing.assert_close(tower.encode([inputs[number]])[0], rows, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_samples", [321, 480, 481, 8000, 8001, 47_999, 48_000])
def test_a_header_tells_the_number_of_tokens(saved: tuple[Path, Any], num_samples: int) -> None:
    layout = layout_of(saved[0])
    samples = tone(num_samples / 16_000)

    assert [layout.sound_size_of(read_header(wav(samples))).tokens] == num_tokens(processed([samples]))


def test_sounds_that_are_too_long_or_too_short_are_refused(saved: tuple[Path, Any]) -> None:
    layout = layout_of(saved[0])

    with pytest.raises(InvalidRequestError, match=f"it has 3.2 s; the model hears {SECONDS} s at once"):
        layout.sound_size_of(read_header(wav(tone(3.2))))
    with pytest.raises(InvalidRequestError, match="too short"):
        layout.sound_size_of(read_header(wav(tone(0.02))))


def test_a_sound_of_another_rate_has_the_tokens_of_its_length(saved: tuple[Path, Any]) -> None:
    layout = layout_of(saved[0])

    sizes = [layout.sound_size_of(read_header(wav(tone(1.5, rate), rate))) for rate in (16_000, 44_100, 8_000)]

    assert {size.tokens for size in sizes} == {37}
    assert isinstance(layout, Qwen2AudioSounds)


def test_the_largest_sound_is_computed(saved: tuple[Path, Any]) -> None:
    layout = layout_of(saved[0])
    tower = load_tower(resolve(str(saved[0])), layout, False, torch.float32, torch.device("cpu"))

    blank = ImageTiles([torch.tensor(each) for each in layout.blank()], layout.largest.height, layout.largest.width)

    assert len(tower.encode([blank])[0]) == layout.largest.tokens
