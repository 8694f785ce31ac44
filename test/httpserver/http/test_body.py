from __future__ import annotations

import subprocess
import sys

import pytest

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.http.body import Body, validate

BUILT = """
import lightserve.httpserver.app
from lightserve.httpserver.http.body import Body

def below(cls):
    return {cls}.union(*map(below, cls.__subclasses__()))

print(len(below(Body)), sum(cls.__pydantic_complete__ for cls in below(Body)))
"""


class Inner(Body):
    count: int


class Outer(Body):
    inner: Inner


def test_no_validator_is_built_before_its_first_body() -> None:
    done = subprocess.run([sys.executable, "-c", BUILT], capture_output=True, text=True, check=True)

    classes, built = map(int, done.stdout.split())
    assert classes > 100
    assert built < 5  # an instance may be the default of a field


def test_a_validator_that_is_built_late_is_as_strict() -> None:
    assert validate(Outer, {"inner": {"count": 1, "unknown": 2}}).inner.count == 1
    with pytest.raises(InvalidRequestError, match=r"inner\.count"):
        validate(Outer, {"inner": {"count": True}})
