"""A wheel has all files of the package, not only its Python, and serves from any folder.

It is built as `python -m build` does: a source distribution from the files of the repository, and the wheel from that.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest

from test.server.launcher_process import tiny_model

ROOT = Path(__file__).parent.parent
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
BUILD_SDIST = "import setuptools.build_meta as build; print(build.build_sdist('dist'))"
NOT_PACKAGED = shutil.ignore_patterns("__pycache__", "*.pyc", "_native*")
NO_COMPILER = {"CC": "false", "CXX": "false"}  # the C library is optional, and takes half a minute
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that it unpacks to."""
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    shutil.copytree(ROOT / "lightserve", source / "lightserve", ignore=NOT_PACKAGED)
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    built = subprocess.run([sys.executable, "-c", BUILD_SDIST], cwd=source, check=True, capture_output=True, text=True)
    [archive] = (source / "dist").glob("*.tar.gz")
    assert archive.name == built.stdout.split()[-1]
    with tarfile.open(archive) as files:
        files.extractall(folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(sdist)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | NO_COMPILER)
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    command = [*PIP, "install", "--no-deps", "--no-index", "--no-compile", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def files_of_package(root: Path) -> set[str]:
    return {
        str(path.relative_to(root))
        for path in (root / "lightserve").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith("_native")
    }


def test_a_source_distribution_has_every_file_of_the_package(sdist: Path) -> None:
    assert files_of_package(sdist) == files_of_package(ROOT)


def test_a_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("lightserve/")}

    assert packed == files_of_package(ROOT)
    assert "lightserve/httpserver/web/chat/main.js" in packed


def test_an_installed_wheel_serves_its_page_from_another_folder(installed: Path, tmp_path: Path) -> None:
    flags = ["--null_worker", "--port", "0", "--httpserver_workers", "1", "--model_dir", str(tiny_model(tmp_path))]
    server = subprocess.Popen(
        [sys.executable, "-m", "lightserve.server.api_server", *flags],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        lines = iter(server.stderr.readline, "")
        [url] = next(found for line in lines if (found := re.findall(r"ready at (http://\S+)", line)))
        request = urllib.request.Request(f"{url}/", headers={"Accept": "text/html"})
        page = urllib.request.urlopen(request).read().decode()
        scripts = re.findall(r'<script type="module" src="([^"]+)"', page)
        assert scripts
        assert all(urllib.request.urlopen(f"{url}/{script.lstrip('./')}").read() for script in scripts)
    finally:
        server.send_signal(signal.SIGTERM)
        _, rest = server.communicate()
    assert server.returncode == 0, rest


def test_an_installed_wheel_has_the_command(installed: Path, tmp_path: Path) -> None:
    def output_of(*command: str | Path) -> str:
        environment = os.environ | {"PYTHONPATH": str(installed)}
        return subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, check=True).stdout

    assert "--help" in output_of(installed / "bin" / "lightserve", "--help")
    imported = output_of(sys.executable, "-c", "import lightserve; print(lightserve.__file__)")
    assert Path(imported.strip()).is_relative_to(installed)
