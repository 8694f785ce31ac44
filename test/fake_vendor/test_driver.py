"""A vendor's driver says in its own words why a server does not start on its device."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightserve.cli import machine
from lightserve.cli.machine import Finding
from lightserve.common import ops
from lightserve.common.device import base, explain_out_of_memory, registry, unusable_packages
from lightserve.errors import ServerError
from lightserve.utils import drivers
from test.api.server import MODULE, START_S, ServerProcess, running_server, start_server
from test.fake_vendor import driver, install
from test.fake_vendor.device import FakeDevice
from test.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
TOO_OLD = "driver 1.2 is too old for this runtime, which needs 1.4: install fakedrv-1.4"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a server in which the package is installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    install.install(folder)
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}


def ended(log: Path, env: dict[str, str], *flags: str) -> ServerProcess:
    server = start_server(log, [sys.executable, *MODULE, "--port", "0", *flags], env)
    wait_until(lambda: server.has_ended, START_S)
    return server


@pytest.mark.slow
def test_a_server_ends_with_the_words_of_the_driver_before_weights_load(
    environment: dict[str, str], small_folder: str, tmp_path: Path
) -> None:
    unloadable = tmp_path / "model"
    shutil.copytree(small_folder, unloadable)
    save_file({"nothing": torch.zeros(1)}, unloadable / "model.safetensors")
    flags = ("--model_dir", str(unloadable), "--device", "fake")

    server = ended(tmp_path / "log", environment | {driver.PROBLEM: TOO_OLD}, *flags)

    assert server.process.returncode != 0
    assert f"device fake, cpu: {TOO_OLD}" in server.log
    assert "Traceback" not in server.log


@pytest.mark.long
def test_memory_that_does_not_suffice_is_named_by_the_driver(
    environment: dict[str, str], small_folder: str, tmp_path: Path
) -> None:
    flags = ("--model_dir", small_folder, "--device", "fake", "--kv_ram_gb", "0.02")

    server = ended(tmp_path / "log", environment | {driver.PINNED_LIMIT: "1000000"}, *flags)

    assert server.process.returncode != 0
    assert "not enough memory (" in server.log
    assert "bytes do not fit the 1000000 that are left on bank 0); lower kv_ram_gb" in server.log


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is taken instead")
def test_a_server_on_the_cpu_says_why_the_installed_one_is_not_used(
    environment: dict[str, str], small_folder: str, tmp_path: Path
) -> None:
    env = environment | {driver.MISSING: "no fake card answers: load the module fakedrv"}

    with running_server(tmp_path / "log", "--model_dir", small_folder, env=env) as server:
        log = server.log

    assert (
        log.count(
            "device fake is installed and not used: no fake card answers: load the module fakedrv; serving on the CPU"
        )
        == 1
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [EntryPoint("fake", f"{FakeDevice.__module__}:FakeDevice", registry.ENTRY_POINTS)]
    monkeypatch.setattr(registry, "entry_points", lambda group: found)


def test_a_failed_allocation_is_explained_by_the_driver_of_the_bound_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_bound", FakeDevice())
    monkeypatch.setenv(driver.PINNED_LIMIT, "10")

    words = r"not enough memory \(20 bytes do not fit .* on bank 0\); lower it"
    with pytest.raises(ServerError, match=words), explain_out_of_memory("lower it"):
        FakeDevice().host_memory((20,), torch.uint8)
    with pytest.raises(RuntimeError, match="something else"), explain_out_of_memory("lower it"):
        raise RuntimeError("something else")


def test_a_device_with_a_problem_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_bound", None)
    monkeypatch.setenv(driver.PROBLEM, TOO_OLD)
    before = ops.rms_norm.active_backend

    with pytest.raises(ServerError, match=r"device fake, cpu: driver 1\.2 is too old"):
        FakeDevice().bind(torch.device("cpu"))

    assert base.bound_device() is None
    assert ops.rms_norm.active_backend == before != FakeDevice.ops_backend


@pytest.mark.usefixtures("installed")
def test_the_doctor_passes_on_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "rocm"):
        monkeypatch.setitem(drivers.DRIVERS, name, drivers.DRIVERS[name]._replace(control=Path("/nowhere")))
        monkeypatch.setattr(registry.BUILT_IN[name], "unavailable_reason", lambda: "it is not here")
    monkeypatch.setenv(driver.PROBLEM, TOO_OLD)
    assert machine.check_gpu(0) == Finding("fake: Fake 1, made of air", f"fake: {TOO_OLD}", is_fatal=True)

    monkeypatch.setenv(driver.MISSING, "no card answers")
    assert unusable_packages() == {"fake": "no card answers"}
    assert machine.check_gpu(0) == Finding("none usable; the CPU computes", "fake: no card answers")
