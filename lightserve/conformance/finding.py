"""What a check of the suite has to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightserve.errors import LightserveError


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    text: str
    passes: bool = True
    is_skipped: bool = False  # the device does not offer it, or this machine has too few


class CheckError(LightserveError):
    """The device does not do what ``Device`` says."""


Check = Callable[[], str]  # returns what it saw, or raises


def run_checks(checks: dict[str, Check]) -> Iterator[Finding]:
    for name, check in checks.items():
        try:
            yield Finding(name, check())
        except NotOfferedError as reason:
            yield Finding(name, str(reason), is_skipped=True)
        except Exception as error:  # a vendor's library may raise anything; the other checks go on
            shown = " ".join(str(error).split())[:300]
            yield Finding(name, shown if isinstance(error, CheckError) else f"{type(error).__name__}: {shown}", False)


class NotOfferedError(LightserveError):
    """There is nothing to check."""


def expect(condition: bool, problem: str) -> None:
    if not condition:
        raise CheckError(problem)
