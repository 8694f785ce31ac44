"""No name in the package is a bare relative word: it must make sense to somebody who has not read the file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "lightserve"
RELATIVE_WORDS = {"one", "own", "other", "found", "said", "kept", "part", "place"}
# chat templates may name the parameter of a test
EXCEPTIONS = {("environment.py", "other")}


def relative_names(source: Path) -> Iterator[str]:
    """Variables, parameters, attributes and functions. Keywords of calls are names of the function's parameters."""
    text = source.read_text(encoding="utf-8")
    if not re.search(rf"\b({'|'.join(RELATIVE_WORDS)})\b", text):  # to parse a file takes some ten milliseconds
        return
    for node in ast.walk(ast.parse(text)):
        for field in () if isinstance(node, ast.keyword) else ("id", "arg", "attr", "name", "asname"):
            name = getattr(node, field, None)
            if name in RELATIVE_WORDS and (source.name, name) not in EXCEPTIONS:
                yield f"{source}:{getattr(node, 'lineno', '')}: {name}"


def test_names_are_told_from_words_in_text(tmp_path: Path) -> None:
    source = tmp_path / "example.py"
    source.write_text('own = "one part"  # of the other\nown_rows = f"{own.rows}"\n')

    assert list(relative_names(source)) == [f"{source}:1: own", f"{source}:2: own"]


def test_no_name_is_a_bare_relative_word() -> None:
    names = [name for source in sorted(PACKAGE.rglob("*.py")) for name in relative_names(source)]

    assert names == []
