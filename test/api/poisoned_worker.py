"""A null worker that crashes at one token of a prompt, as with a bug in a kernel."""

from __future__ import annotations

import os
import signal
from functools import partial

from lightserve.ipc.process import run_child
from lightserve.messages.step import Step
from lightserve.worker.null_worker import NullWorker, main
from lightserve.worker.rpc import GetResult

POISON = 31_999


class PoisonedWorker(NullWorker):
    def __init__(self, step_s: float, vocab_size: int) -> None:
        super().__init__(step_s, vocab_size)
        self._killers: set[int] = set()

    def launch(self, step: Step) -> GetResult:
        self._killers |= {new.req_id for new in step.new if POISON in new.token_ids}
        if any(row.req_id in self._killers for row in step.rows):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().launch(step)


if __name__ == "__main__":
    run_child("null worker", partial(main, worker_class=PoisonedWorker))
