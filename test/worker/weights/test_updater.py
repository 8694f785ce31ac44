"""What an update says of tensors that no model worker has."""

from __future__ import annotations

import pytest

from lightserve.common.device.cpu import CpuDevice
from lightserve.config import WorkerConfig
from lightserve.messages.weights import CheckTensors, WeightTensor
from lightserve.worker.weights.updater import WeightUpdater
from test.models.architectures.case import build
from test.models.architectures.vision_language import CASES
from test.models.tiny import build_model


def test_the_vision_tower_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tiny = build(next(iter(CASES.values())))
    model = build_model(tiny.config_json, tiny.checkpoint())
    updater = WeightUpdater(WorkerConfig(), model, CpuDevice(), rank=0)
    updater._groups["trainer"] = object()  # type: ignore[assignment]  # nothing is received
    norm = next(one for one in tiny.checkpoint() if one.name.endswith("input_layernorm.weight"))
    names = [norm.name, "model.visual.patch_embed.proj.weight"]

    reply = updater.handle(
        CheckTensors("trainer", [WeightTensor(name, "float32", tuple(norm.tensor.shape)) for name in names])
    )

    assert (reply.error, reply.used) == ("", 1)
    assert "1 tensors of the vision tower are left out" in caplog.text
