"""Find the first layer in which a model differs from transformers.

python -m lightserve.tools.dump --model_dir DIR [--prompt TEXT] [--tolerance 1e-3]

Runs one prompt through both and compares the hidden states after every layer and the logits; exit code 1 if they
differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightserve.common.basemodel import ModelInput, TpPartBaseModel
from lightserve.common.basemodel.hooks import recorded
from lightserve.common.ops import NO_ROW, AttnBatch, StateBatch
from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.errors import InvalidRequestError, LightserveError
from lightserve.model_files.source import resolve
from lightserve.model_files.tokenizer.tokenizer import load_tokenizer
from lightserve.tools.oracle import load_transformers
from lightserve.worker.worker import ModelWorker


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    relative: float  # the largest difference, divided by the largest value of transformers


def compare(model: TpPartBaseModel, hf: Any, ids: Sequence[int]) -> list[Difference]:
    """The differences of each hidden state and of the logits from transformers, in the order of computation."""
    if not 0 < len(ids) <= model.req_manager.max_len:
        raise InvalidRequestError(f"the prompt has {len(ids)} tokens; 1 to {model.req_manager.max_len} are allowed")
    with recorded(model) as ours:
        model.forward(_prefill(model, ids))
    with torch.inference_mode():
        out = hf(torch.tensor([list(ids)]), output_hidden_states=True)
    last = model.config.num_layers - 1  # transformers applies the final norm to the last one, so the logits cover it
    theirs = {"embedding": out.hidden_states[0][0]}
    theirs |= {f"layers.{i}": out.hidden_states[i + 1][0] for i in range(last)}
    theirs["logits"] = out.logits[0, -1:]
    return [Difference(name, _relative(ours[name], value)) for name, value in theirs.items()]


def first_difference(differences: Sequence[Difference], tolerance: float) -> Difference | None:
    return next((d for d in differences if not d.relative <= tolerance), None)


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float().cpu() - theirs.float()).abs().max() / theirs.float().abs().max())


def _prefill(model: TpPartBaseModel, ids: Sequence[int]) -> ModelInput:
    """A step with the prompt alone, in the first row, with position i in slot i."""
    count, device = len(ids), model.device
    slots = torch.arange(count, dtype=torch.int32, device=device)
    model.req_manager.req_to_token[0, :count] = slots
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    attn = AttnBatch(model.req_manager.req_to_token, zero, zero, zero + count, zero)
    no_row = zero + NO_ROW
    states = StateBatch(torch.cat((zero, zero + count)), no_row, no_row, count) if model.kv_layout.states else None
    return ModelInput(torch.tensor(list(ids), device=device), slots, slots, attn, is_prefill=True, states=states)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lightserve.tools.dump", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model_dir")
    parser.add_argument("--prompt", default="The capital of France is Paris, and the capital of Italy is")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of the largest value; float32 gives about 1e-5")
    args = parser.parse_args()
    try:
        source = resolve(args.model_dir)
        config = WorkerConfig(
            model_dir=args.model_dir, data_type="float32", max_total_token_num=4096, max_windowed_token_num=0
        )
        model = ModelWorker(config, source, Parallel()).model
        differences = compare(model, load_transformers(source), load_tokenizer(source).encode(args.prompt))
    except LightserveError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    for difference in differences:
        print(f"{difference.name:12} {difference.relative:.2e}")
    first = first_difference(differences, args.tolerance)
    print(f"first difference: {first.name}" if first else f"the same within {args.tolerance:g}")
    sys.exit(first is not None)


if __name__ == "__main__":
    main()
