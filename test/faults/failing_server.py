"""The server with a worker that makes up tokens and raises at a prompt of the token POISON."""

from __future__ import annotations

import sys

from lightserve.server.api_server import main
from lightserve.server.fleet import Modules

if __name__ == "__main__":
    sys.exit(main(modules=Modules(null_worker="test.faults.failing_worker")))
