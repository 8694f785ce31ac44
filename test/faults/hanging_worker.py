"""A null worker whose first replacement, and every other one, is ready and then serves nobody."""

from __future__ import annotations

import threading

from lightserve.ipc.process import ChildConfig, LauncherConnection, run_child
from lightserve.worker import null_worker
from lightserve.worker.rpc import StepServer


def hang(*args: object, **options: object) -> None:
    """The router can connect, because the socket listens. Nobody answers it."""
    threading.Event().wait()


def main(child_config: ChildConfig, launcher: LauncherConnection) -> None:
    if child_config.generation % 2:
        StepServer.serve = hang  # type: ignore[method-assign]
    null_worker.main(child_config, launcher)


if __name__ == "__main__":
    run_child("null worker", main)
