"""Print which model_types have the tensors of a checkpoint: for a model_type that is not supported.

    python -m lightserve.tools.fitting_models --model_dir DIR

A model fits if the checkpoint has every tensor that it needs, in its shape, and no other tensor.
"""

from __future__ import annotations

import argparse
import sys

import torch

from lightserve.common.basemodel import ModelArgs
from lightserve.common.checkpoint.reader import CheckpointTensor, tensor_metadata
from lightserve.common.parallel import Parallel
from lightserve.errors import LightserveError
from lightserve.model_files.source import ModelSource, resolve
from lightserve.models.registry import get_model_class, read_model_config, supported_models


def fitting_models(source: ModelSource) -> list[str]:
    """Llama first: several models have its tensors, and differ from it in factors or windows."""
    tensors = list(tensor_metadata(source))
    names = sorted(supported_models(), key=lambda name: (name != "llama", name))
    return [model_type for model_type in names if _fits(source, model_type, tensors)]


def _fits(source: ModelSource, model_type: str, tensors: list[CheckpointTensor]) -> bool:
    try:
        config = read_model_config(source.hf_config(), model_type)
        args = ModelArgs(config, torch.float32, torch.device("meta"), Parallel(), None, 1, 1, 1, tensors)
        return not get_model_class(model_type).unused_tensors(args)
    except LightserveError:
        return False


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", required=True, help="a folder in the format of Hugging Face")
    args = parser.parse_args(arguments)
    try:
        models = fitting_models(resolve(args.model_dir))
    except LightserveError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(models))
    return 0


if __name__ == "__main__":
    sys.exit(main())
