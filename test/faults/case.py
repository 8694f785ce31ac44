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

from test.faults.census import GpuMemory, gpu_mib, gpu_peak
from test.faults.reactions import Reaction
from test.faults.scene import IDLE, Scene, Situation, scene_of
from test.faults.stage import Stage

SERVER = "lightserve.server.api_server"


@dataclass(frozen=True, slots=True)
class Outcome:
    seconds: float  # from the fault to the reaction
    gpu: GpuMemory


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
    restarts: int = 0  # of the worker; each may take as long as the server's start

    def run(self, stage: Stage, seed: int, slack: float = 1.0) -> Outcome:
        """An exception if there was another reaction. ``slack``: of a busy machine."""
        try:
            return self._run(stage, seed, slack)
        except BaseException:
            stage.clear()
            raise

    def _run(self, stage: Stage, seed: int, slack: float) -> Outcome:
        for is_last in (False, True):
            running = stage.running(self.program, self.flags, 0 if is_last else self.restarts)
            running.restarts += self.restarts
            before, serving_mib = running.census(), gpu_mib()
            within_s = self.within_s * slack + self.restarts * running.start_s
            with gpu_peak() as peak, scene_of(running, self.during, Random(f"{seed} {self.name}"), within_s) as scene:
                begin_s = time.monotonic()
                self.fault(scene)
                self.reaction.wait(scene)
                seconds = time.monotonic() - begin_s
                self.reaction.verify(scene)
            assert seconds < within_s, f"the reaction took {seconds:.1f} s"
            if self.reaction.ends_server:
                running.check_gone(self.reaction.leaves_directory)
                stage.clear()
                break
            running.check_unharmed()
            leftovers = running.leftovers(before)
            if not leftovers:
                break
            assert not is_last, f"left behind: {leftovers}"  # what grows once is a cache, what grows again is a leak
        gpu = GpuMemory(running.gpu_mib_before, serving_mib, peak.mib, gpu_mib())
        assert not gpu.was_held_twice, gpu
        return Outcome(seconds, gpu)
