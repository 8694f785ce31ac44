"""The linear methods by the ``quant_method`` of config.json. A new format is a method and a line in ``METHODS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightserve.common.quantization.experts_method import ExpertsMethod, ExpertsSpec
from lightserve.common.quantization.linear_method import LinearMethod, LinearSpec
from lightserve.common.quantization.unquantized import UnquantizedLinear
from lightserve.model_files.model_config import ModelConfig

LinearMethodFactory = Callable[[LinearSpec, torch.dtype, torch.device], LinearMethod]
ExpertsMethodFactory = Callable[[ExpertsSpec, torch.dtype, torch.device], ExpertsMethod]

# By ``quant_method`` of config.json: from its ``quantization_config`` to a factory. The factory sees the name of every
# linear, so it can return UnquantizedLinear for those that the checkpoint leaves as they are.
# model_config.QUANT_METHODS has the same names: the launcher refuses other ones before torch is imported.
METHODS: dict[str, Callable[[Mapping[str, Any]], LinearMethodFactory]] = {}


def linear_method_factory(config: ModelConfig) -> LinearMethodFactory:
    if config.quantization is None:
        return UnquantizedLinear
    return METHODS[config.quantization["quant_method"]](config.quantization)
