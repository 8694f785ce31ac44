"""A fault, what the server does meanwhile, and what must come of it: declared, and run the same way for all.

A new case is one entry in a list of ``cases/``:

    Case("a client sends nonsense", fault=send_nonsense, reaction=answers(400))

A fault is a function of a Scene that breaks something; a reaction (``reactions.py``) waits for what must follow. Before
and after, the harness looks at what no case may change: the tokens of a known request, the KV pool, processes, threads,
descriptors, files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from test.faults.reactions import Reaction
from test.faults.scene import IDLE, Scene, Situation, scene_of
from test.faults.stage import Stage

SERVER = "lightserve.server.api_server"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    fault: Callable[[Scene], None]
    reaction: Reaction
    during: Situation = IDLE
    flags: tuple[str, ...] = ("--null_step_ms", "5")
    within_s: float = 10.0  # from the fault to the reaction
    is_long: bool = False  # not for every run of the tests
    program: str = SERVER
    wears_out: bool = False  # the server, which gives up after some deaths in a row: the next case gets a new one

    def run(self, stage: Stage, seed: int, slack: float = 1.0) -> float:
        """Seconds from the fault to the reaction; an exception if it was another. ``slack``: of a busy machine."""
        try:
            return self._run(stage, seed, slack)
        except BaseException:
            stage.clear()
            raise

    def _run(self, stage: Stage, seed: int, slack: float) -> float:
        for is_last in (False, True):
            running = stage.running(self.program, self.flags)
            before = running.census()
            with scene_of(running, self.during, Random(f"{seed} {self.name}"), self.within_s * slack) as scene:
                begin_s = time.monotonic()
                self.fault(scene)
                self.reaction.wait(scene)
                seconds = time.monotonic() - begin_s
                self.reaction.verify(scene)
            assert seconds < self.within_s * slack, f"the reaction took {seconds:.1f} s"
            if self.reaction.ends_server:
                running.check_gone(self.reaction.leaves_directory)
                stage.clear()
                break
            running.check_unharmed()
            leftovers = running.leftovers(before)
            if not leftovers:
                if self.wears_out:
                    stage.clear()
                break
            assert not is_last, f"left behind: {leftovers}"  # what grows once is a cache, what grows again is a leak
        return seconds
