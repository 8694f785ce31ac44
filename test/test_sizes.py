"""Folders, files and classes of the package stay small enough to be read."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightserve"
MAX_FILES = 20  # of a folder
MAX_LINES = 450  # of a file
MAX_METHODS = 25  # of a class: public ones, properties too
METHOD = re.compile(r"^    (?:async )?def [a-z]", re.MULTILINE)


def large_classes(source: str) -> Iterator[tuple[str, int]]:
    if len(METHOD.findall(source)) <= MAX_METHODS:  # to parse a file takes some ten milliseconds
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            functions = (child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))
            names = {function.name for function in functions if not function.name.startswith("_")}
            if len(names) > MAX_METHODS:
                yield node.name, len(names)


def test_no_folder_has_more_than_20_files() -> None:
    sizes = Counter(str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))

    assert {folder: size for folder, size in sizes.items() if size > MAX_FILES} == {}


def test_no_file_has_more_than_450_lines() -> None:
    sizes = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}

    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}


def test_no_class_has_more_than_25_public_methods() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}

    assert {name: large for name, source in sources.items() if (large := list(large_classes(source)))} == {}


@pytest.mark.parametrize(("public", "is_large"), [(MAX_METHODS, False), (MAX_METHODS + 1, True)])
def test_only_public_methods_count(public: int, is_large: bool) -> None:
    methods = [f"    def m{number}(self): ...\n" for number in range(public)]
    private = [f"    async def _m{number}(self): ...\n" for number in range(30)]

    assert bool(list(large_classes("class Large:\n" + "".join(methods + private)))) is is_large
