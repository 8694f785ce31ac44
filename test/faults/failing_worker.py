"""A null worker that raises at the prompt POISON_PROMPT and reports NaN for prompts with NAN_TOKEN_ID."""

from __future__ import annotations

from functools import partial

from lightserve.ipc.process import ChildConfig, LauncherConnection, run_child
from lightserve.messages.step import ReqFailed, Step, StepResult
from lightserve.worker import null_worker
from lightserve.worker.rpc import GetResult

POISON_PROMPT = (25, 24, 23, 22, 21)  # a prompt that crashes workers; tokens that every model has
NAN_TOKEN_ID = 11  # a token whose embedding is NaN


def raise_at_poison(step: Step) -> None:
    if any(tuple(new.token_ids) == POISON_PROMPT for new in step.new):
        raise RuntimeError("the step is poisoned")


class FailingWorker(null_worker.NullWorker):
    def launch(self, step: Step) -> GetResult:
        raise_at_poison(step)
        return partial(self._make_nan, {new.req_id for new in step.new if NAN_TOKEN_ID in new.token_ids}, step)

    def _make_nan(self, nan_ids: set[int], step: Step) -> StepResult:
        outs = self._run(step).tokens
        failed = [ReqFailed(out.req_id, 500, "numerical error") for out in outs if out.req_id in nan_ids]
        return StepResult([out for out in outs if out.req_id not in nan_ids], failed)


def main(child_config: ChildConfig, launcher: LauncherConnection) -> None:
    null_worker.main(child_config, launcher, FailingWorker)


if __name__ == "__main__":
    run_child("null worker", main)
