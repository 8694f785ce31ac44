from __future__ import annotations

import ast
import importlib.metadata
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from packaging.requirements import Requirement

from lightserve.config import KvTransport
from lightserve.utils import extras
from lightserve.utils.extras import install_command

PACKAGE = Path(extras.__file__).parent.parent


def advised() -> Iterator[str]:
    """The extras that messages of the package tell how to install."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "install_command":
                (extra,) = node.args
                yield from [str(extra.value)] if isinstance(extra, ast.Constant) else get_args(KvTransport)[1:]


def test_messages_name_packages_of_the_extra_and_their_versions() -> None:
    declared = [Requirement(line) for line in importlib.metadata.requires("lightserve") or []]
    names = set(advised())

    assert {"gpu", "hf", "nixl", "otlp", "ray"} <= names
    for extra in names:
        of_extra = [one for one in declared if one.marker and one.marker.evaluate({"extra": extra})]
        pip, install, *packages = shlex.split(install_command(extra))
        assert (pip, install) == ("pip", "install")
        assert [(one.name, one.specifier) for one in map(Requirement, packages)] == [
            (one.name, one.specifier) for one in of_extra if one.marker and not one.marker.evaluate({"extra": ""})
        ]


def test_without_metadata_the_command_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", requires)

    assert install_command("ray") == "pip install -e '.[ray]' in the folder of setup.py"
