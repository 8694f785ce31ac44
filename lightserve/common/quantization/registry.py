"""Chooses the method of each linear from the model's quantisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch

from lightserve.common.quantization.dequantized import DequantizedLinear
from lightserve.common.quantization.experts_method import ExpertsMethod, ExpertsSpec
from lightserve.common.quantization.linear_method import LinearMethod, LinearSpec
from lightserve.common.quantization.quantized_experts import ExpertsFormats, QuantizedExperts
from lightserve.common.quantization.quantized_linear import QuantizedLinear, StackedLinear
from lightserve.common.quantization.unquantized import UnquantizedLinear
from lightserve.common.quantization.unquantized_experts import UnquantizedExperts
from lightserve.common.quantization.weight_format import format_of
from lightserve.errors import ModelFilesError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.quantization import QuantConfig, Scheme

# Hidden size up to which inputs of packed products keep 15 bits. With 8 bits, logprobs of the ten best tokens are
# 0.071 off on average for SmolLM2-135M (576), and 0.030 for Qwen2.5-Coder-1.5B (1,536); with 15 bits 0.0006 and 0.0002.
SMALL_HIDDEN_SIZE = 1024

LinearMethodFactory = Callable[[LinearSpec, torch.dtype, torch.device], LinearMethod]
ExpertsMethodFactory = Callable[[ExpertsSpec, torch.dtype, torch.device], ExpertsMethod]


def linear_method_factory(
    config: ModelConfig, packed_input_bits: int | None = None, stored_dtype: torch.dtype | None = None
) -> LinearMethodFactory:
    """``packed_input_bits`` is the flag; None: as the model's size needs it.

    ``stored_dtype`` of weights that are not quantised; None: as the activations. Routers and gates have all bits.
    """
    quantization = config.quantization

    def unquantized(spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> LinearMethod:
        is_exact = spec.is_router or spec.is_gate
        return UnquantizedLinear(spec, dtype, device, None if is_exact else stored_dtype)

    if quantization is None:
        return unquantized
    input_bits = _input_bits(config, packed_input_bits)

    def method(scheme: Scheme | None, spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> LinearMethod:
        if scheme is None:
            return unquantized(spec, dtype, device)
        return QuantizedLinear(spec, dtype, device, format_of(scheme), input_bits)

    def make(spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> LinearMethod:
        methods = [method(scheme, run, dtype, device) for scheme, run in _runs(spec, quantization)]
        return methods[0] if len(methods) == 1 else StackedLinear(methods)

    return make


def _input_bits(config: ModelConfig, packed_input_bits: int | None) -> int:
    return packed_input_bits or (15 if config.hidden_size <= SMALL_HIDDEN_SIZE else 8)


def _runs(spec: LinearSpec, quantization: QuantConfig) -> list[tuple[Scheme | None, LinearSpec]]:
    """The linear cut where the scheme of its parts changes."""
    scheme_of = quantization.scheme_of_gate if spec.is_gate else quantization.scheme_of
    if spec.is_router:
        scheme_of = quantization.scheme_of_router
    by_scheme = groupby(spec.parts, lambda linear_part: scheme_of(linear_part.prefix))
    return [(scheme, replace(spec, parts=tuple(parts))) for scheme, parts in by_scheme]


def float_method_factory(config: ModelConfig) -> LinearMethodFactory:
    """For linears whose weight ops read as floats, whatever the checkpoint stores."""
    quantization = config.quantization
    if quantization is None:
        return UnquantizedLinear

    def make(spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> LinearMethod:
        schemes = {quantization.scheme_of(linear_part.prefix) for linear_part in spec.parts}
        stored = {scheme if scheme is not None and scheme.is_stored else None for scheme in schemes}
        if stored == {None}:
            return UnquantizedLinear(spec, dtype, device)
        if len(stored) > 1:
            names = ", ".join(linear_part.prefix for linear_part in spec.parts)
            raise ModelFilesError(f"{names}: different formats for parts of one linear are not supported here")
        scheme = stored.pop()
        assert scheme is not None
        return DequantizedLinear(spec, dtype, device, format_of(scheme))

    return make


def experts_method_factory(
    config: ModelConfig, packed_input_bits: int | None = None, stored_dtype: torch.dtype | None = None
) -> ExpertsMethodFactory:
    """``packed_input_bits`` and ``stored_dtype`` as for linears."""
    quantization = config.quantization
    unquantized = partial(UnquantizedExperts, stored_dtype=stored_dtype)
    if quantization is None:
        return unquantized
    input_bits = _input_bits(config, packed_input_bits)

    def make(spec: ExpertsSpec, dtype: torch.dtype, device: torch.device) -> ExpertsMethod:
        gate_up = _common_scheme(spec.gate_up_modules, quantization)
        down = _common_scheme(spec.down_modules, quantization)
        if gate_up is None and down is None:
            return unquantized(spec, dtype, device)
        if gate_up is None or down is None:
            quantized = spec.gate_up_modules[0] if down is None else spec.down_modules[0]
            raise ModelFilesError(
                f"{spec.prefix}: {quantized} is quantised, and not all of its experts' weights are ({quantization}), "
                "which is not supported; use the unquantised checkpoint"
            )
        formats = ExpertsFormats(format_of(gate_up), format_of(down))
        return QuantizedExperts(spec, dtype, device, formats, input_bits)

    return make


def are_alike(quantization: QuantConfig | None, linears: Sequence[tuple[str, int]]) -> bool:
    """Whether one tensor can hold the weights of linears, each of which is a name and a number of inputs."""
    if quantization is None:
        return True
    schemes = ((quantization.scheme_of(name), in_size) for name, in_size in linears)
    return len({(scheme, scheme and format_of(scheme).group_size(in_size)) for scheme, in_size in schemes}) == 1


def _common_scheme(modules: list[str], quantization: QuantConfig) -> Scheme | None:
    first = quantization.scheme_of(modules[0])
    mismatch = next((module for module in modules if quantization.scheme_of(module) != first), None)
    if mismatch is not None:
        raise ModelFilesError(
            f"{mismatch} is quantised in another way than {modules[0]} ({quantization}), which is not supported for "
            "experts of one layer; use the unquantised checkpoint"
        )
    return first
