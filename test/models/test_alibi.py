from __future__ import annotations

import pytest
import torch
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from lightserve.common.basemodel import alibi_slopes


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 12, 71])
@pytest.mark.parametrize("bias_max", [8, 4])
def test_the_slopes_are_those_of_mpt_for_any_number_of_heads(num_heads: int, bias_max: int) -> None:
    biases = build_mpt_alibi_tensor(num_heads, 2, bias_max)  # of the keys one token before the query, and beside it

    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads, bias_max)), -biases[:, 0, 0])
