"""Detect the watermark in a text.

python -m lightserve.tools.watermark [--model_dir DIR] < TEXT

Prints how many tokens of the text are green, and how many standard deviations this is above chance. A text with 0 to 2
has no watermark, a text with 4 or more has one. The model must be the one that wrote the text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightserve.common.ops.watermark import GREEN_SHARE, is_green
from lightserve.errors import LightserveError
from lightserve.model_files.source import resolve
from lightserve.model_files.tokenizer.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class Finding:
    tokens: int  # that follow another token
    green: int

    @property
    def z_score(self) -> float:
        """Standard deviations above the average of texts without a watermark."""
        expected = GREEN_SHARE * self.tokens
        return float((self.green - expected) / max(expected * (1 - GREEN_SHARE), 1e-9) ** 0.5)


def look_for_watermark(token_ids: Sequence[int]) -> Finding:
    ids = torch.tensor(token_ids, dtype=torch.int64)
    return Finding(max(len(ids) - 1, 0), int(is_green(ids[:-1], ids[1:]).sum()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lightserve.tools.watermark", description=__doc__.splitlines()[0])
    parser.add_argument("--model_dir", help="folder or GGUF file; default: the default model")
    args = parser.parse_args(argv)
    try:
        tokenizer = load_tokenizer(resolve(args.model_dir))
        finding = look_for_watermark(tokenizer.encode(sys.stdin.read(), add_special_tokens=False))
    except LightserveError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{finding.green} of {finding.tokens} tokens are green, z-score {finding.z_score:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
