"""``lightserve.tools.dump`` on a device of another package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from lightserve.common import ops
from lightserve.common.device import base, registry
from lightserve.tools import dump
from test.fake_vendor.device import FakeDevice
from test.fake_vendor.ops import BACKEND


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    found = [EntryPoint("fake", f"{FakeDevice.__module__}:FakeDevice", registry.ENTRY_POINTS)]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.ENTRY_POINTS else [])
    registry._loaded.cache_clear()
    monkeypatch.setattr(base, "_bound", None)
    yield
    registry._loaded.cache_clear()
    ops.use_backend(ops.REFERENCE)


def test_each_layer_on_another_device_is_compared_with_transformers(
    small_folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--model_dir", small_folder, "--device", "fake", "--prompt", "abc 123"]

    assert dump.main(arguments) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "float32 on fake" in first
    assert last == "the same within 0.001"

    product = ops.linear.impls[BACKEND]
    monkeypatch.setitem(ops.linear.impls, BACKEND, lambda *args: product(*args) * 1.1)
    assert dump.main(arguments) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("first difference: layers.0")


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (("--device", "tpu"), "device 'tpu' is not supported"),
        (("--ops_backend", "gems"), "no installed package offers"),
    ],
)
def test_what_is_not_installed_is_named(
    option: tuple[str, str], problem: str, small_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dump.main(["--model_dir", small_folder, *option]) == 2
    assert problem in capsys.readouterr().err
