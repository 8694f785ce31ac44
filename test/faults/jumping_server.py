"""The server with a wall clock that jumps, in all its processes; see ``jumping_clock/sitecustomize.py``."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from lightserve.server.api_server import main

FOLDER = Path(__file__).parent / "jumping_clock"

if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    runpy.run_path(str(FOLDER / "sitecustomize.py"))  # child processes import it from PYTHONPATH
    sys.exit(main())
