"""``python -m lightserve.cli.child PID COMMAND ...``: the lightserve command, which ends when process PID does."""

from __future__ import annotations

import os
import sys

from lightserve.cli.main import main
from lightserve.ipc.child_setup import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    if os.getppid() != int(sys.argv[1]):  # it ended before the line above
        sys.exit(1)
    sys.exit(main(sys.argv[2:]))
