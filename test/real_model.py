"""The real default model, for tests that random weights cannot serve; fetched once a machine."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from lightserve.model_files import ModelSource, Tokenizer, load_tokenizer, resolve

ROOT = Path(__file__).parents[1]
LONG = (ROOT / "LICENSE").read_text()
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "La Révolution française a commencé en",
    "1, 1, 2, 3, 5, 8,",
    "SELECT name, age FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "日本の首都は",
    "😀 😃 😄",
    "<html>\n<head>\n<title>",
    "To be, or not to be:",
    "   leading spaces and\ttabs",
    "Water boils at",
    "import numpy as np\n\nx = np.zeros((3, 4))\n",
    "List three colours:\n-",
    "a",
    LONG[:600],
    LONG[600:1800],
    LONG[1800:3900],
]
GOLDEN_TOKENS = 12


@functools.cache
def smollm2() -> ModelSource:
    return resolve(None)


@functools.cache
def smollm2_tokenizer() -> Tokenizer:
    return load_tokenizer(smollm2())


@functools.cache
def transformers_smollm2() -> Any:
    import torch

    from lightserve.tools.oracle import load_transformers

    with torch.inference_mode(False):  # the first caller may be in it; another trains an adapter
        return load_transformers(smollm2())


@functools.cache
def golden_ids() -> list[list[int]]:
    """What transformers makes of each of PROMPTS: exactly GOLDEN_TOKENS tokens, greedily.

    It takes some ten seconds, so the processes of a run share it.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return _golden_ids()
    path = Path(tempfile.gettempdir(), f"lightserve-golden-{run}.json")
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known: list[list[int]] = json.loads(file.read() or "[]")
        if not known:
            known = _golden_ids()
            json.dump(known, file)
    return known


def _golden_ids() -> list[list[int]]:
    import torch

    tokenizer, model = smollm2_tokenizer(), transformers_smollm2()
    golden = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=GOLDEN_TOKENS,
            min_new_tokens=GOLDEN_TOKENS,
            do_sample=False,
        )
        golden.append(whole[0, ids.shape[1] :].tolist())
    return golden
