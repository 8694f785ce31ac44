"""A wheel has all files of the package, not only its Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("setup.py", "pyproject.toml", "README.md")
NOT_PACKAGED = shutil.ignore_patterns("__pycache__", "*.pyc", "_native*")
NO_COMPILER = {"CC": "false", "CXX": "false"}  # the C library is optional, and takes half a minute


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "lightserve", source / "lightserve", ignore=NOT_PACKAGED)
    for name in SOURCES:
        shutil.copy(ROOT / name, source)

    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    environment = os.environ | NO_COMPILER
    subprocess.run([*command, str(tmp_path), str(source)], check=True, capture_output=True, env=environment)

    [wheel] = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("lightserve/")}
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "lightserve").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith("_native")
    }
    assert packed == expected
    assert "lightserve/httpserver/web/chat/main.js" in packed
