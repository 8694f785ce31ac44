from __future__ import annotations

import pytest
import torch

from lightserve.common.device import KINDS


@pytest.mark.parametrize(
    ("kind", "model_dtype", "wanted"),
    [
        ("cpu", "bfloat16", torch.float32),
        ("cpu", None, torch.float32),
        ("cuda", "float16", torch.float16),
        ("cuda", "bfloat16", torch.bfloat16),
        ("cuda", "float32", torch.bfloat16),
        ("cuda", None, torch.bfloat16),
    ],
)
def test_a_gpu_keeps_the_dtype_of_a_half_precision_model(
    kind: str, model_dtype: str | None, wanted: torch.dtype
) -> None:
    assert KINDS[kind].dtype_for(model_dtype) is wanted
