"""Compressed sounds are decoded within limits, by a process that may end."""

from __future__ import annotations

import io

import numpy as np
import pytest

from lightserve.errors import InvalidRequestError
from lightserve.media.audio import compressed
from lightserve.media.audio.compressed import as_wav
from lightserve.media.audio.resample import resampled
from lightserve.media.audio.wav import decode
from test.media.audio.sounds import KINDS, compressed as file_of, tone, wav


@pytest.mark.parametrize(("kind", "rate"), [("MP3", 44_100), ("FLAC", 16_000), ("OGG", 48_000)])
def test_a_compressed_sound_has_the_samples_that_its_library_reads(kind: str, rate: int) -> None:
    soundfile = pytest.importorskip("soundfile")
    file = file_of(np.stack([tone(1.0, rate), tone(1.0, rate, seed=1)], axis=1), kind, rate)
    samples, _ = soundfile.read(io.BytesIO(file), dtype="float32")

    found, found_rate = decode(as_wav(file, 2.0))

    assert found_rate == 16_000
    np.testing.assert_allclose(found, resampled(samples.mean(axis=1), rate, 16_000), rtol=0, atol=2**-15)


def test_a_sound_that_is_too_long_is_refused_wherever_its_header_says_it_ends() -> None:
    with pytest.raises(InvalidRequestError, match=r"it has more than 0\.5 s, which is the limit"):
        as_wav(file_of(tone(0.6), "FLAC"), 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_or_end_early(kind: str) -> None:
    whole = file_of(tone(0.5), kind)
    with pytest.raises(InvalidRequestError, match="file is damaged or cannot be decoded"):
        as_wav(whole[:40] + bytes(400), 2.0)
    try:
        samples, _ = decode(as_wav(whole[: len(whole) // 2], 2.0))
    except InvalidRequestError:
        return
    assert len(samples) <= 8_000 * 1.1


def test_a_file_that_ends_its_decoder_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("soundfile")
    monkeypatch.setattr(compressed, "MODULE", "lightserve.no_module")

    with pytest.raises(InvalidRequestError, match="the FLAC file is damaged or cannot be decoded"):
        as_wav(b"fLaC", 2.0)

    assert "4 bytes of FLAC ended their decoder (1)" in caplog.text


def test_a_wav_file_is_not_decoded() -> None:
    file = wav(tone(0.1))

    assert as_wav(file, 2.0) is file


@pytest.mark.parametrize("file", [b"", b"\0\0\0\x20ftypM4A ", b"\x1aE\xdf\xa3webm", b"\xff\xf1AAC", b"OGG"])
def test_other_formats_are_refused(file: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not a WAV file, nor MP3, FLAC or Ogg; send PCM"):
        as_wav(file, 2.0)


@pytest.mark.parametrize(
    ("file", "kind"), [(b"ID3", "MP3"), (b"\xff\xfb\x90", "MP3"), (b"fLaC", "FLAC"), (b"OggS", "Ogg")]
)
def test_a_server_without_the_package_says_so(file: bytes, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "find_spec", lambda name: None)

    with pytest.raises(InvalidRequestError, match=f"this server reads no {kind} files: it lacks the package soundfile"):
        as_wav(file, 2.0)
