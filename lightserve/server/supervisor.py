"""Replaces processes that die, unless their replacements fail again and again.

watch ─▶ one dies ─▶ start another one ─▶ wait until it is ready ─▶ watch
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import ClassVar

from lightserve.config import LaunchConfig
from lightserve.server.banner import print_error, print_line
from lightserve.server.child_process import ChildDiedError

MAX_FAILED_RESTARTS = 3  # in a row; then the cause is not an accident
MIN_UPTIME_S = 60.0  # a replacement that dies sooner after its ready message counts as a failed restart
MIN_LOAD_TIMEOUT_S = 120.0  # for a replacement to become ready
REAP_TIMEOUT_S = 60.0  # until a killed process has exited; a GPU driver may delay that


class Supervisor(ABC):
    singular: ClassVar[str]  # what it supervises, for the log
    plural: ClassVar[str]
    restarted: ClassVar[str]

    def __init__(self, config: LaunchConfig) -> None:
        self._may_restart = config.restart_worker == "on"
        self._failed_restarts = 0
        self._ready_s: float | None = None  # when the present replacements were ready; None: not yet

    @property
    def load_timeout_s(self) -> float:
        """For replacements to become ready."""
        return MIN_LOAD_TIMEOUT_S

    @property
    @abstractmethod
    def _can_restart(self) -> bool: ...

    @abstractmethod
    async def _wait_death(self) -> ChildDiedError: ...

    @abstractmethod
    async def _replace(self) -> bool:
        """Start replacements. Returns False if the old processes did not exit in time."""

    @abstractmethod
    async def _join(self) -> str:
        """Wait until the replacements are ready, and let them serve. Returns why they cannot; empty: they do."""

    @abstractmethod
    def _kill(self, reason: str) -> None:
        """Kill the replacements."""

    async def run(self) -> None:
        """Restart processes until a death that must end the server, and raise it as ChildDiedError."""
        died = await self._wait_death()
        while self._may_restart and self._can_restart and not await self._must_give_up():
            print_error(f"{died}; restarting {self.restarted}")
            since_s, self._ready_s = time.monotonic(), None
            if not await self._replace():
                print_error(f"a killed {self.singular} did not exit within {REAP_TIMEOUT_S:.0f} s: giving up")
                break
            joining = asyncio.create_task(self._wait_joined(since_s, self.load_timeout_s))
            try:
                died = await self._wait_death()
            finally:
                joining.cancel()
            self._count_restart()
        raise died

    def _count_restart(self) -> None:
        """A replacement has died."""
        ran_long = self._ready_s is not None and time.monotonic() - self._ready_s >= MIN_UPTIME_S
        self._failed_restarts = 0 if ran_long else self._failed_restarts + 1

    async def _must_give_up(self) -> bool:
        if self._failed_restarts < MAX_FAILED_RESTARTS:
            return False
        print_error(f"{self._failed_restarts} new {self.plural} in a row died within {MIN_UPTIME_S:.0f} s: giving up")
        return True

    async def _wait_joined(self, since_s: float, timeout_s: float) -> None:
        if await self._is_joined(timeout_s):
            seconds = time.monotonic() - since_s
            print_line(f"a new {self.singular} is ready, {seconds:.1f} s after the last one died")

    async def _is_joined(self, timeout_s: float) -> bool:
        """Whether the replacements serve. They are killed if they cannot."""
        try:
            async with asyncio.timeout(timeout_s):
                refusal = await self._join()
        except TimeoutError:
            refusal = f"it was not ready within {timeout_s:.0f} s"
        if refusal:
            self._kill(refusal)
            return False
        self._ready_s = time.monotonic()
        return True
