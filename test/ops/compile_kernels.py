"""Compile all that the wrappers launch, for a GPU that is not there; print the result as JSON.

    python -m test.ops.compile_kernels 89 heavy
    python -m test.ops.compile_kernels gfx942 sample

The arguments are a compute capability or an architecture of AMD, and which kernels: ``sample``, some of a decode step;
``each``, every kernel in few configurations; ``heavy``, which use much shared memory, only as far as that is known;
``all``, in the configurations of large models too, these three in bfloat16, which nearly every model has; ``every
dtype``, every head_dim and every option of attention alone, which takes many minutes; or ``without assembly``,
those that hold it elsewhere. The wrappers run on CPU tensors while Triton is told that such a GPU is there,
and each launch stops after the compiler. So a kernel is compiled with the very types, constants and alignments that its
wrapper passes. This runs as a process of its own, because Triton decides on import whether it interprets.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lightserve.common import ops, triton_kernel
from lightserve.common.compile.server import AbsentGpu
from lightserve.common.device.cuda import cuda_traits
from lightserve.common.device.profile import KIB, gpu_profile
from lightserve.common.device.rocm import rocm_traits
from lightserve.common.triton_kernel import batch_invariant
from lightserve.common.triton_kernel.attention._attention import MAX_HEAD_DIM
from lightserve.common.triton_kernel.experts import _grouped_experts, experts
from lightserve.common.triton_kernel.experts._expert_linear import PairBlocks, expert_linear
from lightserve.common.triton_kernel.experts._expert_pairs import sort_pairs
from lightserve.common.triton_kernel.experts._quantized_expert_linear import quantized_expert_linear
from lightserve.common.triton_kernel.linear import (
    _int4_tiles,
    _scaled_products,
    _weight_only_linear,
    dequantize,
    linear,
    linear_int4,
    norm_linear,
)
from lightserve.common.triton_kernel.lora import lora_linear
from lightserve.conformance.inputs.state import NO_ROW, Request, conv_args, delta_args, mamba_args
from test.ops.cases import (
    ARGS,
    FLOATS,
    attention_args,
    context_attention_args,
    eight_bit_weight,
    experts_params,
    floats,
    int4_weight,
    int4_weight_with_zero_points,
    latent_args,
    latent_context_args,
    lora_linear_args,
    selection_args,
    share_prefixes,
    with_alibi,
    with_options,
)
from test.ops.quantized import CODES, empty_cache, empty_latents, quantized, quantized_latents, tiled

BACKENDS = ("triton", ops.batch_invariant("triton"))
HEAD_DIMS = {  # ARGS holds 64
    "heavy": (128, 512),  # where tiles take most of shared memory
    "all": (128,),
    "every dtype": (80, 128, 256, MAX_HEAD_DIM),
}
# of _kv_codes.py or _int4.py; Triton inserts some of its own
OWN_ASSEMBLY = re.compile(r"\.reg \.b32 (biased|low|sorted)[,;]")


class Card(NamedTuple):
    target: GPUTarget
    multiprocessors: int
    shared_kib: int  # of a thread block
    traits: ops.DeviceTraits


def _nvidia(capability: int, multiprocessors: int, shared_kib: int) -> Card:
    return Card(GPUTarget("cuda", capability, 32), multiprocessors, shared_kib, cuda_traits(divmod(capability, 10)))


def _amd(arch: str, lanes: int, multiprocessors: int, shared_kib: int) -> Card:
    return Card(GPUTarget("hip", arch, lanes), multiprocessors, shared_kib, rocm_traits(arch))


CARDS = {
    "80": _nvidia(80, 108, 163),  # A100
    "89": _nvidia(89, 58, 99),  # L4
    "90": _nvidia(90, 132, 227),  # H200
    "100": _nvidia(100, 148, 227),  # B200
    "gfx942": _amd("gfx942", 64, 304, 64),  # MI300X, MI325X
    "gfx950": _amd("gfx950", 64, 256, 160),  # MI350X, MI355X
    "gfx1100": _amd("gfx1100", 32, 96, 64),  # Radeon RX 7900
}
# each kind of weights, with one scale per row, per tile, and with several in a tile; the largest tile
QUANTIZED_EXPERTS: list[tuple[type[ops.QuantizedWeight], int, bool, int]] = [
    (ops.Fp8Weight, 2048, False, 8),
    (ops.Fp8Weight, 128, False, 128),
    (ops.Int8Weight, 32, True, 8),
    (ops.Int4Weight, 128, True, 8),
    (ops.Int4Weight, 32, False, 64),
    (ops.Mxfp4Weight, 32, False, 8),
    (ops.Mxfp4Weight, 16, False, 8),
]
SAMPLE = ("add_rms_norm", "token_attention", "sample", "silu_and_mul", "linear_int4")


class AbsentCard(AbsentGpu):
    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Replaces ``JITFunction.run``; records the shared memory of each kernel in each dtype, or the error.

    ``with_assembly``: the kernels of which some launch holds inline assembly.
    """

    def __init__(self) -> None:
        self.dtype = "bfloat16"
        self.with_assembly: set[str] = set()
        self.shared_bytes: dict[str, dict[str, int]] = {}
        self.errors: dict[str, str] = {}
        self._run = JITFunction.run

    def install(self, target: GPUTarget) -> None:
        driver.set_active(AbsentCard(target))
        JITFunction.run = lambda *args, **kwargs: self.compile(*args, **kwargs)

    def compile(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = kernel.fn.__name__
        try:
            compiled = self._run(kernel, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:  # whatever the compiler raises is this kernel's result; the others go on
            self.errors[name] = f"{self.dtype}: {error!r}"
            return
        if OWN_ASSEMBLY.search(compiled.asm.get("ptx", "")):
            self.with_assembly.add(name)
        by_dtype = self.shared_bytes.setdefault(name, {})
        by_dtype[self.dtype] = max(by_dtype.get(self.dtype, 0), compiled.metadata.shared)


def stop_at_shared_memory() -> None:
    """Leave out the machine code, which takes a third of the time. What is left is cached in a folder of its own."""
    add_stages = CUDABackend.add_stages

    def add_fewer(self: CUDABackend, stages: dict[str, Any], options: Any, language: Any) -> None:
        def name_it(module: Any, metadata: dict[str, Any]) -> str:
            metadata["name"] = "no_code"
            return ""

        add_stages(self, stages, options, language)
        stages |= {"ptx": name_it, "cubin": lambda module, metadata: b""}

    CUDABackend.add_stages = add_fewer
    knobs.cache.dir += "-without-code"


def compile_every_wrapper(dtype: torch.dtype) -> None:
    for backend in BACKENDS:
        for name, op in ops.OPS.items():
            if backend in op.impls:
                op.impls[backend](*ARGS[name](16, dtype, "cpu"))
    ops.sample.impls["triton"](*ARGS["sample"](16, dtype, "cpu")[:4])  # without masks


def compile_each_kernel(dtype: torch.dtype) -> None:
    """Those that no wrapper launches with its ``ARGS`` too."""
    compile_every_wrapper(dtype)
    compile_shared_prefix(dtype, 64)
    compile_latents_without_positions(dtype)
    compile_linear(dtype)
    compile_norm_linear(dtype)
    compile_lora_linear(dtype)
    compile_tiles(dtype)
    weight = int4_weight(128, 8192, 128, "cpu")
    x = torch.ones(32, 8192, dtype=dtype)
    _int4_tiles.multiply(x, weight, None, _int4_tiles.config_of(x, weight))
    linear_int4.multiply(x, weight, None, linear_int4.DEEP)
    compile_pairs(dtype, experts_params(32, 2048, 768, dtype, "cpu"))
    compile_quantized_experts(dtype, QUANTIZED_EXPERTS[:1])
    _weight_only_linear.dequantize(eight_bit_weight(128, 2048, torch.int8, "cpu"), dtype)
    product = torch.ones(8, 128, dtype=torch.int32)
    _scaled_products.scale_output(product, torch.ones(8, 1), torch.ones(128), None, dtype)


def compile_heavy(dtype: torch.dtype, head_dims: Sequence[int]) -> None:
    """The kernels with large tiles, at the largest number of rows that their rules allow."""
    for dim in head_dims:
        shape = ([(700, 1), (800, 1)], (8, 2), dim, dtype, "cpu")
        for backend in BACKENDS:
            ops.context_attention.impls[backend](*with_alibi(context_attention_args(*shape), torch.ones(8)))
            ops.token_attention.impls[backend](*with_alibi(attention_args(*shape), torch.ones(8)))
        compile_shared_prefix(dtype, dim)
    if dtype != torch.float16:  # its tiles are those of bfloat16
        compile_latent_attention(dtype)
    compile_linear(dtype)
    compile_norm_linear(dtype)
    compile_lora_linear(dtype)
    compile_experts(dtype)
    compile_eight_bit(dtype)
    compile_linear_int4(dtype)
    compile_state(dtype)
    compile_aten(dtype)


def compile_aten(dtype: torch.dtype) -> None:
    """The largest tiles, rows that are read twice, and parts of a row."""
    x = torch.ones(2, 256, 128, dtype=dtype)
    ops.bmm.impls["triton"](x, x.transpose(1, 2))
    ops.softmax.impls["triton"](torch.ones(2, 70000, dtype=dtype), -1)
    ops.top_k.impls["triton"](torch.ones(2, 70000, dtype=dtype), 64, -1)


def compile_shared_prefix(dtype: torch.dtype, dim: int) -> None:
    q, cache, batch, options = attention_args([(700, 1), (800, 1)], (8, 2), dim, dtype, "cpu")
    ops.token_attention.impls["triton"](q, cache, share_prefixes(cache, batch, [(0, 2, 600)]), options)


def compile_attention_options(dtype: torch.dtype, dim: int, *, with_each_alone: bool) -> None:
    sinks = torch.ones(8)
    alone: list[dict[str, Any]] = [{"window": 100}, {"softcap": 30.0}]
    together: dict[str, Any] = {"window": 100, "softcap": 30.0, "sinks": sinks}
    for changes in [*alone, together] if with_each_alone else [together]:
        for backend in BACKENDS:
            context = context_attention_args([(700, 1), (800, 9)], (8, 2), dim, dtype, "cpu")
            ops.context_attention.impls[backend](*with_options(context, **changes))
            decode = attention_args([(700, 1), (800, 1)], (8, 2), dim, dtype, "cpu")
            ops.token_attention.impls[backend](*with_options(decode, **changes))
    q, cache, batch, options = attention_args([(700, 1), (800, 1)], (8, 2), dim, dtype, "cpu")
    batch, options = share_prefixes(cache, batch, [(0, 2, 600)]), replace(options, softcap=30.0, sinks=sinks)
    ops.token_attention.impls["triton"](q, cache, batch, options)
    context = context_attention_args([(0, 9)], (8, 2), dim, dtype, "cpu")
    q, kv, cache, batch, options = with_options(context, causal=False)
    for num_keys in (None, batch.b_seq_len):
        ops.context_attention.impls["triton"](q, kv, cache, replace(batch, b_num_keys=num_keys, plans={}), options)
    for window in (None, 100):
        q, kv, cache, batch, options = context_attention_args([(700, 1), (800, 9)], (8, 2), dim, dtype, "cpu")
        batch, options = replace(batch, see_until=batch.b_seq_len.new_zeros(len(q))), replace(options, window=window)
        for backend in BACKENDS:
            ops.context_attention.impls[backend](q, kv, cache, replace(batch, plans={}), options)


def compile_quantized_kv(dim: int) -> None:
    """In bfloat16, whose queries are converted to float16."""
    lens, heads, dtype = [(700, 1), (800, 1)], (8, 2), torch.bfloat16
    for codes in filter(ops.active_traits().has_dot, CODES):
        q, cache, batch, options = attention_args(lens, heads, dim, dtype, "cpu")
        batch = share_prefixes(cache, batch, [(0, 2, 600)])
        ops.token_attention.impls["triton"](q, quantized(cache, codes), batch, options)
        q, kv, cache, batch, options = context_attention_args(lens, heads, dim, dtype, "cpu")
        for backend in BACKENDS:
            ops.context_attention.impls[backend](q, kv, quantized(cache, codes), replace(batch, plans={}), options)
        for name in ("write_kv", "norm_rotary_write_kv"):
            *args, plain = ARGS[name](16, dtype, "cpu")
            ops.OPS[name].impls["triton"](*args, empty_cache(plain.shape, codes, "cpu"))


def compile_latent_attention(dtype: torch.dtype) -> None:
    """With the sizes of DeepSeek, GLM-4.7-Flash and Mistral 4. In 16 bits, 128 heads have larger tiles than 16."""
    shapes = [(16, 128, 64, 128, 512), (20, 192, 64, 256, 512), (32, 64, 64, 128, 256)]
    for shape in [*shapes, (128, 128, 64, 128, 512)] if dtype == torch.bfloat16 else shapes:
        decode = latent_args([(70, 1), (80, 1)], shape, dtype, "cpu")
        q, latent, cache, kv_b, batch, options = latent_context_args([(70, 1), (80, 9)], shape, dtype, "cpu")
        batch = replace(batch, has_decodes=True)
        for backend in BACKENDS:
            ops.latent_token_attention.impls[backend](*decode)
        ops.latent_context_attention.impls["triton"](q, latent, cache, kv_b, batch, options)
    compile_latents_without_positions(dtype)
    if dtype == torch.bfloat16:
        compile_quantized_latents()
    for heads in (32, 64):  # of GLM-5 and DeepSeek V3.2
        ops.select_tokens.impls["triton"](*selection_args([(70, 1), (80, 9)], (heads, 128), dtype, "cpu"))


def compile_latents_without_positions(dtype: torch.dtype) -> None:
    q, latent, norm, _, slots, cache = ARGS["write_latent"](16, dtype, "cpu")
    ops.write_latent.impls["triton"](q, latent, norm, None, slots, cache)


def compile_quantized_latents() -> None:
    """With the sizes of DeepSeek, in bfloat16, whose queries are converted to float16."""
    lens, shape, dtype = [(70, 1), (80, 9)], (16, 128, 64, 128, 512), torch.bfloat16
    for codes in filter(ops.active_traits().has_dot, CODES):
        q, latent, cache, kv_b, batch, options = latent_context_args(lens, shape, dtype, "cpu")
        coded, has_decodes = quantized_latents(cache, shape[-1], codes), replace(batch, has_decodes=True)
        ops.latent_context_attention.impls["triton"](q, latent, coded, kv_b, has_decodes, options)
        invariant = ops.batch_invariant("triton")
        ops.latent_context_attention.impls[invariant](q, latent, coded, kv_b, replace(batch, plans={}), options)
        *args, plain = ARGS["write_latent"](16, dtype, "cpu")
        rank = args[2].weight.shape[0]
        ops.OPS["write_latent"].impls["triton"](
            *args, empty_latents((17, rank, plain.shape[2] - rank), codes, dtype, "cpu")
        )


def compile_state(dtype: torch.dtype) -> None:
    """With the sizes of Qwen3-Next, Kimi-Linear and Nemotron-H; prompts and decodes."""
    prompt: list[Request] = [(64, NO_ROW, 0, 1, 63)]  # with a snapshot, as in all steps with prompts
    for by_channel in (False, True):
        ops.gated_delta_rule.impls["triton"](*delta_args(prompt, (1, 2, 128, 128), dtype, "cpu", by_channel))
    ops.mamba_scan.impls["triton"](*mamba_args(prompt, (1, 2, 64, 128), dtype, "cpu"))
    decode: list[Request] = [(1, 0, 0)]
    ops.gated_delta_rule.impls["triton"](*delta_args(decode, (1, 2, 128, 128), dtype, "cpu"))
    for requests in (prompt, decode):
        inputs, states, batch = delta_args(requests, (1, 2, 128, 128), dtype, "cpu")
        ops.gated_delta_rule.impls["triton"](inputs, states.bfloat16(), batch)
    for requests in (decode, prompt):
        ops.causal_conv1d.impls["triton"](*conv_args(requests, 8192, dtype, "cpu"))


def compile_linear(dtype: torch.dtype) -> None:
    weight = torch.ones(128, 2048, dtype=dtype)
    for config in (linear.NARROW, linear.WIDE, linear.SMALL):
        for rows in (8, 32):
            linear.multiply(torch.ones(rows, 2048, dtype=dtype), weight, None, config)
    ops.linear.impls["triton"](torch.ones(8, 2048, dtype=dtype), weight[:1], torch.ones(1, dtype=dtype))
    batch_invariant.linear(torch.ones(64, 2048, dtype=dtype), weight)


def compile_linear_int4(dtype: torch.dtype) -> None:
    """As many rows as there may be, large and small groups, zero points and other offsets, narrow and deep weights."""
    for rows, in_size, group, has_offsets in ((1, 2048, 128, False), (16, 8192, 128, True), (8, 2048, 32, True)):
        x, weight = torch.ones(rows, in_size, dtype=dtype), int4_weight(128, in_size, group, "cpu", has_offsets)
        linear_int4.multiply(x, weight, None, linear_int4.config_of(x, weight))
    zero_points = int4_weight_with_zero_points(128, 2048, 128, "cpu")
    few_rows, is_wide = torch.ones(8, 2048, dtype=dtype), dtype == torch.float32
    for config in (linear_int4.WIDE, linear_int4.NARROW):
        linear_int4.multiply(few_rows, zero_points, None, linear_int4.FLOAT32 if is_wide else config)
    weights: list[ops.Int4Weight] = [weight]
    if ops.active_traits().has_inline_ptx:  # others keep the usual layout
        weights.append(tiled(zero_points))
    for rows in _int4_tiles.TILINGS:
        x = torch.ones(rows, 2048, dtype=dtype)
        for each in weights:
            own = _int4_tiles.config_of(x, each)
            _int4_tiles.multiply(x, each, None, own)
            if not is_wide:
                _int4_tiles.multiply(x, each, None, replace(own, block_n=_int4_tiles.WIDE, splits=1))
    _int4_tiles.multiply(x, weight, None, _int4_tiles.invariant_config(dtype))
    compile_tiles(dtype)


def compile_tiles(dtype: torch.dtype) -> None:
    weight = tiled(int4_weight(128, 2048, 128, "cpu", has_offsets=True))
    dequantize.dequantize(weight, torch.empty(weight.shape, dtype=dtype))


def compile_norm_linear(dtype: torch.dtype) -> None:
    """In every dtype, though the wrapper takes it in few."""
    norm_weight, weight = torch.ones(2048, dtype=dtype), torch.ones(128, 2048, dtype=dtype)
    for rows, config, is_gated in ((1, norm_linear.NARROW, True), (2, norm_linear.NARROW, False)):
        x = torch.ones(rows, 2048, dtype=dtype)
        norm_linear.multiply(x, x, norm_weight, 1e-5, weight, None, config=config, is_gated=is_gated)


def compile_lora_linear(dtype: torch.dtype) -> None:
    """In every dtype, though the wrapper takes few of them with a norm."""
    for rows, config, has_norm in ((1, norm_linear.NARROW, True), (8, linear.NARROW, False), (8, linear.WIDE, False)):
        x, layer = lora_linear_args(rows, 2048, (64, 32, 32), dtype, "cpu")
        norm = lora_linear.Norm(x, torch.ones(2048, dtype=dtype), 1e-5) if has_norm else None
        lora_linear.multiply(x, layer, config, norm)


def compile_experts(dtype: torch.dtype) -> None:
    """Every configuration of the products, pairs that are not sorted, and what the grouped matmul needs."""
    x, params = torch.ones(2, 2048, dtype=dtype), experts_params(32, 2048, 768, dtype, "cpu")
    ids, weights = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2)
    ops.experts.impls["triton"](x, ids, weights, params)
    compile_pairs(dtype, params)
    pairs = sort_pairs(ids, 32, 16)
    blocks = PairBlocks(pairs.blocks, pairs.pairs, 2)
    for config in (experts.INVARIANT, *(experts.config_of(most, 1) for most, _ in experts.CONFIGS)):
        gated = expert_linear(x, floats(params.w13), blocks, config, params.b13, params.activation)
        expert_linear(gated, floats(params.w2), blocks, config)
    expert_linear(x, floats(params.w13), blocks, experts.INVARIANT, None, ops.Relu2())
    compile_quantized_experts(dtype, QUANTIZED_EXPERTS)


def compile_pairs(dtype: torch.dtype, params: ops.ExpertsParams) -> None:
    x, ids = torch.ones(2, 2048, dtype=dtype), torch.zeros(2, 2, dtype=torch.int32)
    for tokens in (30, 1200):  # other tiles, other kernels
        sort_pairs(torch.zeros(tokens, 2, dtype=torch.int32), 32, 16)
    pairs = sort_pairs(ids, 32, 16)
    gathered = _grouped_experts.gather_tokens(x, pairs.pairs, 2)
    for activation in (params.activation, ops.Relu2()):
        _grouped_experts.activate_pairs(gathered, params.b13, ids, pairs.pairs, activation)


def compile_quantized_experts(
    dtype: torch.dtype, weights: Sequence[tuple[type[ops.QuantizedWeight], int, bool, int]]
) -> None:
    x, ids = torch.ones(2, 2048, dtype=dtype), torch.zeros(2, 2, dtype=torch.int32)
    for kind, group, has_offsets, block_m in weights:
        weight = kind.empty((4, 256, 2048), group, torch.device("cpu"), has_offsets=has_offsets)
        pairs = sort_pairs(ids, 4, block_m)
        blocks = PairBlocks(pairs.blocks, pairs.pairs, 2)
        quantized_expert_linear(x, weight, blocks, block_m, None, ops.GatedSilu())
    quantized_expert_linear(x, weight, blocks, block_m, None, ops.Relu2())
    quantized_expert_linear(x[:1], weight, PairBlocks(ids[:1], None, 2), 8)


def compile_eight_bit(dtype: torch.dtype) -> None:
    """Both sizes of tiles, with scales per row and per group; fp8 where the GPU has it."""
    plain, grouped = (eight_bit_weight(128, 2048, torch.int8, "cpu", group=group) for group in (2048, 128))
    ops.linear_int8.impls["triton"](torch.ones(64, 2048, dtype=dtype), plain)
    ops.linear_int8.impls[BACKENDS[1]](torch.ones(64, 2048, dtype=dtype), grouped)
    _weight_only_linear.dequantize(plain, dtype)
    compile_rounded(dtype, plain, ops.RowQuant(torch.int8))
    if dtype != torch.bfloat16:  # the dtype is that of the result only
        return
    fp8, fp8_blocks = (eight_bit_weight(128, 2048, torch.float8_e4m3fn, "cpu", group=group) for group in (2048, 128))
    ops.linear_fp8.impls["triton"](torch.ones(64, 2048, dtype=dtype), fp8_blocks)
    if ops.active_traits().has_dot(torch.float8_e4m3fn):
        compile_rounded(dtype, fp8, ops.RowQuant(torch.float8_e4m3fn, scale=torch.ones(())))
        compile_rounded(dtype, fp8_blocks, ops.RowQuant(torch.float8_e4m3fn, 128))


def compile_rounded(dtype: torch.dtype, weight: ops.QuantizedWeight, quant: ops.RowQuant) -> None:
    x, norm_weight = torch.ones(128, 2048, dtype=dtype), torch.ones(2048, dtype=dtype)
    ops.silu_and_mul_quantize.impls["triton"](x, quant)
    ops.add_rms_norm_quantize.impls["triton"](x, x, norm_weight, 1e-5, quant)
    for rows in (8, 128):
        codes, scales = ops.quantize_rows.impls["triton"](x[:rows], quant)
        for backend in BACKENDS:
            ops.linear_quantized_rows.impls[backend](codes, scales, weight, None, dtype)
    product = torch.ones(8, 128, dtype=torch.int32 if quant.dtype == torch.int8 else torch.bfloat16)
    _scaled_products.scale_output(product, torch.ones(8, 1), torch.ones(128), None, dtype)


def main(card_name: str, which: str) -> None:
    compiler, card = Compiler(), CARDS[card_name]
    compiler.install(card.target)
    if which == "heavy":
        stop_at_shared_memory()
    triton_kernel.use_profile(gpu_profile(card_name, card.multiprocessors, card.shared_kib * KIB))
    ops.use_traits(card.traits)
    if which == "without assembly":
        ops.use_traits(replace(ops.active_traits(), has_inline_ptx=False))
        compile_linear_int4(torch.bfloat16)
        compile_quantized_latents()
    elif which == "sample":
        for name in SAMPLE:
            ops.OPS[name].impls["triton"](*ARGS[name](16, torch.bfloat16, "cpu"))
        compile_linear(torch.bfloat16)
    elif which == "each":
        compile_each_kernel(torch.bfloat16)
    else:
        compile_for(compiler, which)
    compiler.dtype = "bfloat16"
    for dim in () if which in ("sample", "each") else HEAD_DIMS["heavy"] if which == "heavy" else (128,):
        compile_quantized_kv(dim)
    with_assembly = sorted(compiler.with_assembly)
    print(
        json.dumps({"shared_bytes": compiler.shared_bytes, "errors": compiler.errors, "with_assembly": with_assembly})
    )


def compile_for(compiler: Compiler, which: str) -> None:
    for dtype in FLOATS if which == "every dtype" else (torch.bfloat16,):
        compiler.dtype = str(dtype).removeprefix("torch.")
        if which != "heavy":
            compile_every_wrapper(dtype)
            compile_attention_options(dtype, HEAD_DIMS[which][0], with_each_alone=which == "every dtype")
        compile_heavy(dtype, HEAD_DIMS[which])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
