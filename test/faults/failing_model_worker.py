"""A model worker that raises at the prompt POISON_PROMPT and whose embedding of NAN_TOKEN_ID is NaN."""

from __future__ import annotations

import copy

from lightserve.common.basemodel import DecoderPreAndPostWeight
from lightserve.common.quantization import UnquantizedLinear
from lightserve.ipc.process import ChildConfig, LauncherConnection, run_child
from lightserve.messages.step import Step
from lightserve.worker import main as model_main, worker
from lightserve.worker.rpc import GetResult
from test.faults.failing_worker import NAN_TOKEN_ID, raise_at_poison


class FailingModelWorker(worker.ModelWorker):
    def warm_up(self) -> None:
        self._make_nan()
        super().warm_up()

    def launch(self, step: Step) -> GetResult:
        raise_at_poison(step)
        return super().launch(step)

    def _make_nan(self) -> None:
        """The model can read the token but never samples it. A head tied to the embedding becomes a separate tensor."""
        weights = self.model.pre_post_weight
        assert isinstance(weights, DecoderPreAndPostWeight)
        head, embedding = copy.copy(weights.lm_head.method), weights.embedding.method
        assert isinstance(head, UnquantizedLinear)
        assert isinstance(embedding, UnquantizedLinear)
        weights.lm_head = copy.copy(weights.lm_head)
        weights.lm_head.method = head
        head.weight = head.weight.clone()
        head.weight[NAN_TOKEN_ID] = 0
        embedding.weight[NAN_TOKEN_ID] = float("nan")


def main(child_config: ChildConfig, launcher: LauncherConnection) -> None:
    worker.ModelWorker = FailingModelWorker  # type: ignore[misc]  # model_main imports the class from there
    model_main.main(child_config, launcher)


if __name__ == "__main__":
    run_child("model worker", main)
