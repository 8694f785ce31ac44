"""What may come of a fault. Each waits until it has come, and raises when something else has."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from test.faults.census import processes_of
from test.faults.scene import Scene

TOLD_S = 5.0  # within which a client learns that its answer will not come
GONE_S = 10.0  # within which every process of a server that ends is gone


@dataclass(frozen=True, slots=True)
class Reaction:
    words: str  # in the table
    wait: Callable[[Scene], None]  # its time counts
    verify: Callable[[Scene], None] = lambda _: None  # what takes time to look at
    ends_server: bool = False
    leaves_directory: bool = False  # nobody is left who could remove it; the next server does


def ends(exit_code: int, says: str = "", leaves_directory: bool = False) -> Reaction:
    """The server: clients are told, every process goes, and the launcher's last words have ``says``."""

    def wait(scene: Scene) -> None:
        begin_s = time.monotonic()
        for stream in scene.streams:
            stream.rest()
        told_s = time.monotonic() - begin_s
        assert scene.server.process.wait(scene.deadline_s) == exit_code
        scene.wait_until(lambda: not processes_of(scene.running.base))
        assert says in scene.server.log, scene.server.log[-2000:]
        assert told_s < TOLD_S * scene.deadline_s / GONE_S, f"clients were told after {told_s:.1f} s"

    words = f"clients told, all ends, exit code {exit_code}"
    return Reaction(words, wait, ends_server=True, leaves_directory=leaves_directory)


def go_on(scene: Scene) -> None:
    """Every answer under way is whole."""
    for stream in scene.streams:
        stream.rest()
        assert stream.is_whole, stream.seen[-500:]


def same_text(scene: Scene) -> None:
    """As without the fault: asked again, all are answered the same."""
    again = [scene.stream(**stream.body) for stream in scene.streams]
    for stream, other in zip(scene.streams, again, strict=True):
        other.rest()
        assert other.is_whole, other.seen[-500:]
        assert stream.text == other.text, f"then {stream.text!r}\nnow  {other.text!r}"


STREAMS_GO_ON = Reaction("streams go on, same text", go_on, same_text)


def _hang_and_go_on(scene: Scene) -> None:
    scene.wait_until(lambda: scene.health() == 503)
    resume_all(scene)
    go_on(scene)


UNHEALTHY_THEN_GOES_ON = Reaction("/health 503; when it is back, streams go on, same text", _hang_and_go_on, same_text)


def resume_all(scene: Scene) -> None:
    for process in processes_of(scene.running.base):
        with contextlib.suppress(psutil.NoSuchProcess):  # a watchdog may have replaced it
            process.resume()


def _aborted(scene: Scene) -> None:
    scene.wait_until(lambda: scene.load() == 0)


ABORTED = Reaction("aborted", _aborted)


def _served_on(scene: Scene) -> None:
    assert scene.health() == 200
    assert scene.text_of({"prompt": [501, 502, 503], "max_tokens": 4})


SERVED_ON = Reaction("others are served", _served_on)


def answers(*statuses: int) -> Reaction:
    """Of what the fault sent, every one of these and no other."""

    def wait(scene: Scene) -> None:
        assert set(scene.statuses) == set(statuses), scene.statuses
        _served_on(scene)

    return Reaction(" or ".join(map(str, statuses)), wait)
