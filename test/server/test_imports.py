"""What the processes of a server load before they can begin: each import is a part of every start."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_TEXTS = ("router.main", "worker.main", "worker.null_worker")
OF_TEXTS_AND_DOWNLOADS = ("jinja2", "yaml", "http.client", "urllib.request", "lightserve.model_files.hub")


def test_a_process_without_texts_loads_no_templates_and_no_client_of_the_hub() -> None:
    imports = "; ".join(f"import lightserve.{module}" for module in WITHOUT_TEXTS)
    program = f"import sys; {imports}; print([m for m in {OF_TEXTS_AND_DOWNLOADS} if m in sys.modules])"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_the_process_of_grammars_loads_no_event_loop() -> None:
    program = "import sys, lightserve.text.grammar.process; print('asyncio' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"
