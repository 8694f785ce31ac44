"""A fault, the workload of the server, and the expected reaction. All cases run in the same way.

A new case is one entry in a list of ``cases/``:

    Case("a client sends nonsense", fault=send_nonsense, reaction=responds(400))

A fault is a function of a FaultContext that breaks something. A reaction (``reactions.py``) waits for what must follow.
Before and after, the harness checks what no case may change: the tokens of a known request, the KV pool, processes,
threads, descriptors, files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from test.faults.harness import IDLE, FaultContext, Workload, fault_context
from test.faults.reactions import Reaction
from test.faults.resource_snapshot import GpuMemory, gpu_mib, gpu_peak
from test.faults.server_pool import ServerPool

SERVER = "lightserve.server.api_server"


@dataclass(frozen=True, slots=True)
class Outcome:
    seconds: float  # from the fault to the reaction
    gpu: GpuMemory


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    fault: Callable[[FaultContext], None]
    reaction: Reaction
    during: Workload = IDLE
    flags: tuple[str, ...] = ("--null_step_ms", "5")
    within_s: float = 10.0  # from the fault to the reaction
    is_long: bool = False  # runs only with --long
    program: str = SERVER
    restarts: int = 0  # of the worker; each may take as long as the start of the server

    def run(self, pool: ServerPool, seed: int, slack: float = 1.0) -> Outcome:
        """Raise an exception after any other reaction. ``slack`` multiplies the time limits, for a loaded machine."""
        try:
            return self._run(pool, seed, slack)
        except BaseException:
            pool.clear()
            raise

    def _run(self, pool: ServerPool, seed: int, slack: float) -> Outcome:
        for is_last in (False, True):
            running = pool.running(self.program, self.flags, 0 if is_last else self.restarts)
            running.restarts += self.restarts
            before, serving_mib = running.resource_snapshot(), gpu_mib()
            within_s = self.within_s * slack + self.restarts * running.start_s
            with (
                gpu_peak() as peak,
                fault_context(running, self.during, Random(f"{seed} {self.name}"), within_s) as context,
            ):
                begin_s = time.monotonic()
                self.fault(context)
                self.reaction.wait(context)
                seconds = time.monotonic() - begin_s
                self.reaction.verify(context)
            assert seconds < within_s, f"the reaction took {seconds:.1f} s"
            if self.reaction.ends_server:
                running.check_no_leftovers(self.reaction.keeps_directory)
                pool.clear()
                break
            running.check_recovered()
            leftovers = running.leftovers(before, is_last)
            if not leftovers:
                break
            assert not is_last, f"left behind: {leftovers}"  # growth in one run may be a cache, in both it is a leak
        gpu = GpuMemory(running.gpu_mib_before, serving_mib, peak.mib, gpu_mib())
        assert not gpu.is_doubled, gpu
        return Outcome(seconds, gpu)
