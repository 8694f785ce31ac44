"""The null worker, but for a prompt that it raises at."""

from __future__ import annotations

from lightserve.io_struct import Step
from lightserve.router.model_infer import null_worker
from lightserve.router.model_infer.model_rpc import Collect
from lightserve.utils.process import Boot, Parent, run_child

POISON = 31_999


class FailingWorker(null_worker.NullWorker):
    def launch(self, step: Step) -> Collect:
        if any(POISON in new.prompt_ids for new in step.new):
            raise RuntimeError("the step is poisoned")
        return super().launch(step)


def main(boot: Boot, parent: Parent) -> None:
    null_worker.main(boot, parent, FailingWorker)


if __name__ == "__main__":
    run_child("null worker", main)
