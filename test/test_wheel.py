"""A wheel has all files of the package, not only its Python, and serves from a new virtual environment.

``python -m build`` makes a source distribution of the files of the repository, and the wheel from that.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from test.server.launcher_process import tiny_model

ROOT = Path(__file__).parent.parent
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
NOT_PACKAGED = shutil.ignore_patterns("__pycache__", "*.pyc", "_native*")
NO_COMPILER = {"CC": "false", "CXX": "false"}  # the C library is optional, and takes half a minute
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution and a wheel."""
    pytest.importorskip("build", reason="build is missing: pip install -r requirements-test.txt")
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "lightserve", source / "lightserve", ignore=NOT_PACKAGED)
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    subprocess.run(command, cwd=source, check=True, capture_output=True, env=os.environ | NO_COMPILER)
    return source / "dist"


@pytest.fixture(scope="module")
def sdist(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that it unpacks to."""
    folder = tmp_path_factory.mktemp("unpacked")
    [archive] = built.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    [unpacked] = folder.iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [path] = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of a new virtual environment with the wheel.

    The packages that it needs are those of this one, by their path: torch alone would take minutes.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files are not read
    options = ["install", "--no-deps", "--no-index", "--no-compile", "--ignore-installed", str(wheel)]
    python = folder / "bin" / "python"
    subprocess.run([*PIP, "--python", str(python), *options], check=True, capture_output=True)
    return folder / "bin"


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


def test_an_installed_wheel_serves_its_page_from_another_folder(clean: Path, tmp_path: Path) -> None:
    flags = ["--null_worker", "--port", "0", "--httpserver_workers", "1", "--model_dir", str(tiny_model(tmp_path))]
    server = subprocess.Popen(
        [clean / "python", "-m", "lightserve.server.api_server", *flags],
        cwd=tmp_path,
        env=without_path(),
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


def test_an_installed_wheel_has_the_command(clean: Path, tmp_path: Path) -> None:
    def output_of(*command: str | Path) -> str:
        run = subprocess.run(command, cwd=tmp_path, env=without_path(), text=True, capture_output=True, check=True)
        return run.stdout

    assert "--help" in output_of(clean / "lightserve", "--help")
    imported = output_of(clean / "python", "-c", "import lightserve; print(lightserve.__file__)")
    assert Path(imported.strip()).is_relative_to(clean.parent)


def test_a_wheel_asks_for_packages_that_the_tests_have(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        text = files.read(name).decode()
    required = [Requirement(line) for line in re.findall(r"^Requires-Dist: (.*)$", text, flags=re.MULTILINE)]
    needed = [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]

    assert {"torch", "fastapi"} <= {each.name for each in needed}
    assert [str(each) for each in needed if not each.specifier.contains(metadata.version(each.name))] == []


def without_path() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
