"""The server with workers of ``hanging_worker``."""

from __future__ import annotations

import sys

from lightserve.server.api_server import main
from lightserve.server.process_group import Modules

if __name__ == "__main__":
    sys.exit(main(modules=Modules(null_worker="test.faults.hanging_worker")))
