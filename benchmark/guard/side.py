"""A tree of the repository whose server is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.guard.loads import Load, warm_up
from benchmark.serving.server import Server

START_S = 240.0  # nothing is compiled yet
CPU_TIME = "CPU us"  # of all processes of the server, for each token; other programs on the machine change it least
LIBRARY = "lightserve/common/cpu_kernel/_native*.so"
Figures = dict[tuple[str, str], float]  # by load and figure


@dataclass(frozen=True, slots=True)
class Side:
    name: str
    tree: Path
    kernel_cache: Path  # a side that found the kernels of the other would start faster

    def environment(self) -> dict[str, str]:
        """So that the tree is imported, and whatever else the path of this process has, after it."""
        paths = [str(self.tree), *(os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(self.kernel_cache)}

    def check(self) -> None:
        """Raises ValueError if a server would run other code than that of the tree."""
        command = [sys.executable, "-c", "import lightserve; print(lightserve.__file__)"]
        child = subprocess.run(command, cwd=self.tree, env=self.environment(), capture_output=True, text=True)
        imported = Path(child.stdout.strip() or "nothing")
        if not imported.is_relative_to(self.tree):
            raise ValueError(f"{self.tree} has no lightserve to measure: Python imports {imported}; {child.stderr}")

    @property
    def has_library(self) -> bool:
        return any(self.tree.glob(LIBRARY))

    def measure(self, flags: Sequence[str], loads: Sequence[Load], round_number: int) -> Figures:
        """Start the server, run every load, stop it. The first start compiles kernels and is a figure of its own."""
        begin = time.monotonic()
        server = Server([*flags], tree=self.tree, environment=self.environment())
        try:
            url = server.wait_until_ready(START_S)
            start_s = time.monotonic() - begin
            warm_up(url, loads)
            figures: Figures = {("start", "again, s" if round_number else "first, s"): start_s}
            for number, load in enumerate(loads):
                before_s = sum(server.cpu_s().values())
                values = load.run(url, 100 * round_number + number)
                values[CPU_TIME] = (sum(server.cpu_s().values()) - before_s) / load.output_tokens * 1e6
                figures |= {(load.name, figure): value for figure, value in values.items()}
        finally:
            server.stop()
        return figures
