"""Metadata as pip would write it, in a folder for PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: lightserve-fake\nVersion: 1.0\n"
ENTRY_POINTS = """\
[lightserve.devices]
fake = test.fake_vendor.device:FakeDevice

[lightserve.ops]
fake_norms = test.fake_vendor.norms
misnamed = test.fake_vendor.norms
"""


def install(folder: Path) -> None:
    info = folder / "lightserve_fake-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
