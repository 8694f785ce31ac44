"""Compressed sounds of clients: each is decoded by a process of its own, which has limits of time and memory.

libsndfile decodes them, which the package soundfile brings. It is C code: a file that is too much for it ends that
process, and no other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from threading import BoundedSemaphore

from lightserve.errors import InvalidRequestError, OverloadedError
from lightserve.media.audio.wav import REMEDY
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

MODULE = "lightserve.media.audio.decode_process"
DAMAGED, TOO_LONG = 3, 4  # exit codes of that module
AT_ONCE = 2  # files that a process of the server has decoded: each takes up to a core and 2 GiB
WAIT_S = 30.0  # for others
DECODE_S = 120.0
_decoding = BoundedSemaphore(AT_ONCE)


def as_wav(data: bytes, max_seconds: float) -> bytes:
    """A WAV file as it is; of a compressed one the mean of its channels, 16,000 samples of 16 bits a second.

    It takes a while, so it is called in a thread.
    """
    if data[:4] == b"RIFF":
        return data
    kind = _kind_of(data)
    if not kind:
        raise InvalidRequestError(f"not a WAV file, nor MP3, FLAC or Ogg; {REMEDY}")
    if find_spec("soundfile") is None:
        raise InvalidRequestError(f"this server reads no {kind} files: it lacks the package soundfile; {REMEDY}")
    if not _decoding.acquire(timeout=WAIT_S):
        raise OverloadedError("too many compressed sounds are being decoded; retry later")
    try:
        return _decoded(data, kind, max_seconds)
    finally:
        _decoding.release()


def _kind_of(data: bytes) -> str:
    """By its first bytes; empty: none that is read."""
    if data.startswith(b"fLaC"):
        return "FLAC"
    if data.startswith(b"OggS"):
        return "Ogg"
    is_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2  # of layer III
    return "MP3" if is_frame or data.startswith(b"ID3") else ""


def _decoded(data: bytes, kind: str, max_seconds: float) -> bytes:
    command = [sys.executable, "-m", MODULE, str(max_seconds)]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, input=data, capture_output=True, env=env, timeout=DECODE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise InvalidRequestError(f"the {kind} file takes too long to decode; {REMEDY}") from error
    if done.returncode == 0:
        return done.stdout
    if done.returncode == TOO_LONG:
        raise InvalidRequestError(f"it has more than {max_seconds:g} s, which is the limit; send it in parts")
    if done.returncode != DAMAGED:
        logger.warning("%d bytes of %s ended their decoder (%d): %s", len(data), kind, done.returncode, _last(done))
    raise InvalidRequestError(f"the {kind} file is damaged or cannot be decoded; {REMEDY}")


def _last(done: subprocess.CompletedProcess[bytes]) -> str:
    """The last line that it wrote."""
    lines = done.stderr.decode(errors="replace").splitlines()
    return lines[-1][:200] if lines else "it wrote nothing"
