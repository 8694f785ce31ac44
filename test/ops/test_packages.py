from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint

import pytest

from lightserve.common import ops
from lightserve.common.device import ops_backends, registry
from test.ops import packages
from test.ops.cases import bind, device_of

VALUES = {
    registry.ENTRY_POINTS: ("fake", "test.fake_vendor.device:FakeDevice"),
    ops_backends.ENTRY_POINTS: ("fake_norms", "test.fake_vendor.norms"),
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    found: Callable[[str], list[EntryPoint]] = lambda group: [EntryPoint(*VALUES[group], group)]  # noqa: E731
    for module in (packages, registry, ops_backends):
        monkeypatch.setattr(module, "entry_points", found)
    registry._loaded.cache_clear()
    yield
    registry._loaded.cache_clear()
    packages.TORCH_TYPES.clear()


@pytest.mark.parametrize(("name", "op"), [("fake", ops.linear), ("fake_norms", ops.rms_norm)])
def test_kernels_of_a_package_are_found_by_the_name_of_their_backend(
    name: str, op: ops.registry.Op[..., object]
) -> None:
    packages.load_backend(name)

    assert device_of(name) == packages.TORCH_TYPES[name]
    bind(name)
    assert op.active_backend == name
