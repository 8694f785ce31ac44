from __future__ import annotations

from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel.state._linear_scan import run


@ops.gated_delta_rule.impl("triton")
def gated_delta_rule(inputs: ops.DeltaInputs, states: Tensor, batch: ops.StateBatch) -> Tensor:
    return run("gated_delta_rule", inputs.scan(), states, batch)
