"""``lightserve conformance`` passes a good device, and finds what is wrong with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.device import API_VERSION, Graphs, base, registry
from lightserve.common.device.base import CopyPart, Wait
from lightserve.common.device.cpu import CpuCopyStream
from lightserve.common.ops.registry import OPS
from lightserve.conformance import main
from lightserve.errors import ServerError
from test.fake_vendor.device import FakeDevice, FakeGraphs


class LateCopies(CpuCopyStream):
    """Copies down when somebody waits for them, and another step has written."""

    def down(self, hosts: Sequence[Tensor], gather: CopyPart) -> Wait:
        def copy() -> None:
            for i, host in enumerate(hosts):
                gather(slice(i, i + 1), host[None])

        return copy


class StaleGraphs(FakeGraphs[Any, Any]):
    """Replays with the input of the capture."""

    def replay(self, key: Any, inputs: Tensor) -> Any:
        return self._function(self._inputs[key], key)


class BrokenDevice(FakeDevice):
    """Each method is wrong in a way that computes something."""

    name = "broken"
    api_version = API_VERSION

    def to_device(self, array: np.ndarray, device: torch.device) -> Tensor:
        return torch.from_numpy(array).flip(0)

    def copy_stream(self, device: torch.device) -> Any:
        return LateCopies(device, self.set_current)

    def graphs(self, function: Callable[[Tensor, Any], Any]) -> Graphs[Any, Any]:
        return StaleGraphs(function)

    def kv_budget(self, device: torch.device, mem_fraction: float) -> int:
        return int(1e6 / mem_fraction)

    def seconds_of(self, work: Callable[[], object]) -> float:
        return super().seconds_of(work) * 1e3  # milliseconds


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    values = {"fake": f"{FakeDevice.__module__}:FakeDevice", "broken": f"{__name__}:BrokenDevice"}
    found = [EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in values.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.ENTRY_POINTS else [])
    registry._loaded.cache_clear()
    monkeypatch.setattr(base, "_bound", None)
    yield
    registry._loaded.cache_clear()
    ops.use_backend(ops.REFERENCE)


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Each check by its name, without spaces, with its mark."""
    found = {}
    for line in capsys.readouterr().out.splitlines():
        if line[:2] in ("ok", "--", "!!"):
            found[line[4:30].strip()] = f"{' '.join(line[:2].split() + line[30:].split())}"
    return found


def test_the_cpu_passes_in_every_op_and_copy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--device", "cpu", "--only", "ops", "device"]) == 0

    shown = lines(capsys)
    assert shown.keys() >= OPS.keys()
    assert {line[:2] for line in shown.values()} <= {"ok", "--"}
    assert shown["relu"].startswith("ok missing torch")
    assert shown["silu"].startswith("ok native cpu")
    assert shown["add_lora"].startswith("ok composed torch")
    assert shown["graphs"].startswith("-- none")


def test_a_device_of_another_package_passes(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["linear", "rms_norm", "token_attention", "add_lora"]
    assert main.main(["--device", "fake", "--only", "ops", "device", "--ops", *names]) == 0

    shown = lines(capsys)
    assert shown["linear"].startswith("ok native fake")
    assert shown["graphs"] == "ok 2 captured, replayed with other inputs"
    assert "bfloat16" not in shown["rms_norm"]


def test_each_fault_of_a_device_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--device", "broken", "--only", "device"]) == 1

    shown = lines(capsys)
    assert shown["copy to the device"] == "!! a copy of int32 differs"
    assert shown["copies beside the steps"] == "!! a copy down has what a later step wrote"
    assert shown["graphs"] == "!! a replay differs from the work"
    assert shown["time of work"].startswith("!! 20 products are said to take")
    assert shown["KV budget"].startswith("!! a share of 0.5 gives 2000000 bytes, one of 0.9 1111111")
    assert shown["copy to the host"].startswith("ok")


def wrong(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) * 1.01


def failing(x: Tensor) -> Tensor:
    raise RuntimeError("no kernel\nfor this")


def integers(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x).int()


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (wrong, "torch.float32: 1.0e-02 from the definition; the limit is 1.0e-04"),
        (failing, "fails in torch.float32: RuntimeError: no kernel for this"),
        (integers, "torch.float32: inf from the definition"),
    ],
)
def test_an_operator_that_differs_from_its_definition_is_found(
    kernel: Callable[[Tensor], Tensor],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = "cpu_native" if "cpu_native" in ops.silu.impls else "cpu"
    monkeypatch.setitem(ops.silu.impls, backend, kernel)

    assert main.main(["--device", "cpu", "--only", "ops", "--ops", "silu", "relu"]) == 1

    shown = lines(capsys)
    assert problem in shown["silu"]
    assert shown["relu"].startswith("ok")


def separate_sum(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    summed = residual.clone()
    return ops.linear(ops.add_rms_norm(x, summed, norm_weight, eps), weight, bias), summed


def test_a_sum_may_be_in_the_memory_of_the_residual_or_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    op = ops.OPS["add_rms_norm_linear"]
    for backend in op.impls.keys() - {ops.REFERENCE} or {"cpu"}:
        monkeypatch.setitem(op.impls, backend, separate_sum)

    assert main.main(["--device", "cpu", "--only", "ops", "--ops", op.name]) == 0

    assert lines(capsys)[op.name].startswith("ok native")


def test_an_unknown_operator_is_refused_with_one_that_is_like_it() -> None:
    with pytest.raises(ServerError, match="--ops silo: there is no such op; did you mean silu"):
        main.main(["--device", "cpu", "--only", "ops", "--ops", "silo"])


@pytest.mark.slow
@pytest.mark.tp
def test_the_cpu_passes_with_two_ranks_a_model_and_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--device", "cpu", "--only", "ranks", "model"]) == 0

    shown = lines(capsys)
    assert shown["collectives"] == "ok 2 ranks by gloo: sums, gathers, scatters, sends"
    assert shown["a server's answers"].startswith("ok 3 texts over HTTP, those of the model")


@pytest.mark.long
def test_the_gpu_of_this_machine_or_its_cpu_passes_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
