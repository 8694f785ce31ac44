"""compressed-tensors' ``pack-quantized`` (w4a16, w8a16) and ``mxfp4-pack-quantized``."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.model_files.quantization.compressed_tensors import SCHEMES, Group
from lightserve.model_files.quantization.fields import check_value, choice, number_of, refused
from lightserve.model_files.quantization.grouped import PackQuantizedScheme
from lightserve.model_files.quantization.quant_config import Scheme

HAS_G_IDX = {"group": True, "dynamic": True, "weight": False, "static": False}  # by actorder
MXFP4_GROUP = 32


@dataclass(frozen=True)
class Mxfp4PackScheme(Scheme):
    def __str__(self) -> str:
        return f"mxfp4, groups of {MXFP4_GROUP}"


def pack_quantized_scheme(group: Group) -> PackQuantizedScheme:
    _check_weight_only(group)
    weights = group.weights
    check_value(weights, "type", "int")
    is_grouped = choice(weights, "strategy", {"group": True, "channel": False})
    actorder = weights.get("actorder")
    has_g_idx = actorder is not None and choice(weights, "actorder", HAS_G_IDX)
    return PackQuantizedScheme(
        number_of(weights, "num_bits", 4, 8),
        group.group_size if is_grouped else None,
        group.is_symmetric,
        has_g_idx and is_grouped,
    )


def mxfp4_scheme(group: Group) -> Mxfp4PackScheme:
    _check_weight_only(group)
    check_value(group.weights, "num_bits", 4)
    check_value(group.weights, "group_size", MXFP4_GROUP)
    return Mxfp4PackScheme()


def _check_weight_only(group: Group) -> None:
    if group.input_activations:
        raise refused(f"config_groups.{group.name}.input_activations of {group.format}", "with a value", "null")


SCHEMES["pack-quantized"] = pack_quantized_scheme
SCHEMES["mxfp4-pack-quantized"] = mxfp4_scheme
