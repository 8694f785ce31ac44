"""The server with a worker that raises at the prompt POISON_PROMPT and computes NaN for the token NAN_TOKEN_ID."""

from __future__ import annotations

import sys

from lightserve.server.api_server import main
from lightserve.server.process_group import Modules

WORKERS = Modules(worker="test.faults.failing_model_worker", null_worker="test.faults.failing_worker")

if __name__ == "__main__":
    sys.exit(main(modules=WORKERS))
