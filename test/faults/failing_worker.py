"""The null worker, but for a prompt that it raises at and one that it has no numbers for."""

from __future__ import annotations

from functools import partial

from lightserve.io_struct import ReqFailed, Step, StepResult
from lightserve.utils.process import Boot, Parent, run_child
from lightserve.worker import null_worker
from lightserve.worker.rpc import Collect

POISON = (25, 24, 23, 22, 21)  # a prompt that workers die of; tokens that every model has
SPOILT_ID = 11  # a token whose embedding is no number


def raise_at_poison(step: Step) -> None:
    if any(tuple(new.prompt_ids) == POISON for new in step.new):
        raise RuntimeError("the step is poisoned")


class FailingWorker(null_worker.NullWorker):
    def launch(self, step: Step) -> Collect:
        raise_at_poison(step)
        return partial(self._spoil, {new.req_id for new in step.new if SPOILT_ID in new.prompt_ids}, step)

    def _spoil(self, spoilt: set[int], step: Step) -> StepResult:
        outs = self._run(step).tokens
        failed = [ReqFailed(out.req_id, 500, "numerical error") for out in outs if out.req_id in spoilt]
        return StepResult([out for out in outs if out.req_id not in spoilt], failed)


def main(boot: Boot, parent: Parent) -> None:
    null_worker.main(boot, parent, FailingWorker)


if __name__ == "__main__":
    run_child("null worker", main)
