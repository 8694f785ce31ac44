"""Perplexity of a model on a fixed text, and its greedy text, to compare formats of weights and of KV.

    python -m benchmark.engine.perplexity [--text FILE] [--window 512] [--tokens 4096] [--greedy 24] [flags]

Flags are those of the worker: --model_dir, --kv_dtype, --data_type and so on. The text is perplexity.txt beside this
file, so that figures of different days can be compared; it is cut into windows, and each is one prompt without the
tokens before it. ``--greedy N`` also prints N greedy tokens for each of 20 prompts: run it twice and compare the lines.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightserve.config import WorkerConfig
from lightserve.config.parse import Parser, add_flags, config_from_args
from lightserve.errors import LightserveError

if TYPE_CHECKING:
    from lightserve.offline.llm import LLM

TEXT = Path(__file__).with_name("perplexity.txt")
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "La Révolution française a commencé en",
    "1, 1, 2, 3, 5, 8,",
    "SELECT name, age FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics are",
    "<html>\n<head>\n<title>",
    "To be, or not to be:",
    "Water boils at",
    "import numpy as np\n\nx = np.zeros((3, 4))\n",
    "List three colours:\n-",
    "The speed of light is approximately",
    "A recipe for pancakes: first,",
    "In 1969, the first human",
    "The opposite of hot is",
    "class Stack:\n    def push(self, item):\n",
    "Photosynthesis is the process by which",
)


@dataclass(frozen=True, slots=True)
class Perplexity:
    tokens: int  # that have a logprob: all but the first of each window
    mean_logprob: float

    @property
    def value(self) -> float:
        return math.exp(-self.mean_logprob)


def windows_of(ids: Sequence[int], window: int) -> list[list[int]]:
    """Pieces of at most ``window`` tokens; a last piece of one token is dropped, because it has no logprob."""
    pieces = [list(ids[start : start + window]) for start in range(0, len(ids), window)]
    return [piece for piece in pieces if len(piece) > 1]


def measure(llm: LLM, ids: Sequence[int], window: int) -> Perplexity:
    """Of the tokens ``ids``, by the logprobs of prompts."""
    logprobs: list[float] = []
    for piece in windows_of(ids, window):
        (generation,) = llm.generate([piece], max_new_tokens=1, temperature=0, prompt_logprobs=0)
        if generation.prompt_logprobs is None:
            raise LightserveError(f"a window of {len(piece)} tokens has no logprobs: {generation.error}")
        logprobs += [token.logprob for token in generation.prompt_logprobs if token.logprob is not None]
    if not logprobs:
        raise LightserveError("the text has fewer than two tokens")
    return Perplexity(len(logprobs), math.fsum(logprobs) / len(logprobs))


def greedy_lines(llm: LLM, new_tokens: int) -> list[str]:
    """The greedy continuation of each of PROMPTS, one line each."""
    found = llm.generate(PROMPTS, max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
    return [f"{prompt!r} -> {one.text!r}" for prompt, one in zip(PROMPTS, found, strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m benchmark.engine.perplexity", description="Perplexity of a model on a text.")
    parser.add_argument("--text", type=Path, default=TEXT, help="a text file")
    parser.add_argument("--window", type=int, default=512, help="tokens of one prompt")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text, from its beginning")
    parser.add_argument("--greedy", type=int, default=0, help="also print this many greedy tokens for 20 prompts")
    add_flags(parser, WorkerConfig)
    args = parser.parse(argv)
    if min(args.window, args.tokens) < 2:
        parser.error("--window and --tokens must be at least 2")
    try:
        from lightserve.offline.llm import (
            LLM,  # here, because it imports torch: --help and errors in flags do not need it
        )

        llm = LLM(**asdict(config_from_args(WorkerConfig, args)))
        ids = llm.tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
        found = measure(llm, ids, args.window)
        print(f"perplexity {found.value:.4f} (mean logprob {found.mean_logprob:.6f} of {found.tokens} tokens)")
        for line in greedy_lines(llm, args.greedy) if args.greedy else ():
            print(line)
    except LightserveError as error:
        print(f"lightserve: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
