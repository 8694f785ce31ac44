"""Find the first layer in which a model differs from transformers.

python -m lightserve.tools.dump --model_dir DIR [--device NAME] [--prompt TEXT] [--tolerance 1e-3]

Runs one prompt through both and compares the hidden states after every layer and the logits. Ours computes on any
device, transformers on the CPU. The exit code is 1 if they differ, and 2 if they cannot be compared.
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
from lightserve.model_files.transformers_config import is_installed
from lightserve.tools.oracle import load_transformers
from lightserve.utils.extras import install_command
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


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightserve.tools.dump", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model_dir")
    parser.add_argument("--prompt", default="The capital of France is Paris, and the capital of Italy is")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or one of a package; default: the best one here")
    parser.add_argument("--ops_backend", nargs="+", metavar="NAME", default=[], help="as for the server")
    parser.add_argument(
        "--data_type", choices=["float32", "float16", "bfloat16"], default="float32", help="of ours; default: float32"
    )
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of the largest value; float32 gives about 1e-5")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    try:
        differences = _differences(args)
    except LightserveError as error:
        print(error, file=sys.stderr)
        return 2
    for difference in differences:
        print(f"{difference.name:12} {difference.relative:.2e}")
    first = first_difference(differences, args.tolerance)
    print(f"first difference: {first.name}" if first else f"the same within {args.tolerance:g}")
    return int(first is not None)


def _differences(args: argparse.Namespace) -> list[Difference]:
    if not is_installed():
        raise LightserveError(f"the comparison needs the package transformers; run: {install_command('hf')}")
    source = resolve(args.model_dir)
    config = WorkerConfig(
        model_dir=args.model_dir,
        device=args.device,
        ops_backend=args.ops_backend,
        data_type=args.data_type,
        max_total_token_num=4096,
        max_windowed_token_num=0,
    )
    worker = ModelWorker(config, source, Parallel())
    print(f"LightServe {worker.dtype_and_device}, transformers in float32 on the CPU")
    ids = load_tokenizer(source).encode(args.prompt)
    try:
        hf = load_transformers(source)
    except (ImportError, OSError, ValueError) as error:  # it knows no such model, or not these files
        raise LightserveError(f"transformers cannot load this model: {' '.join(str(error).split())[:200]}") from error
    return compare(worker.model, hf, ids)


if __name__ == "__main__":
    sys.exit(main())
