"""What replaced aten operators and fused ones gain: torch, ours, and FlagGems if it is installed.

    python -m benchmark.kernels.aten                       # a GPU; --device cpu tries it on tiny shapes

Calls are replayed as a graph over more memory than the cache holds. The model is transformers' Llama with random
weights, called step by step, with the launches of Python.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import lightserve.ops
from lightserve.bench.ceilings import seconds_per_call
from lightserve.common.device import Device, pick_device

ROTATED_BYTES = 256 * 2**20
MAX_COPIES = 64


class Sizes(NamedTuple):
    rows: tuple[int, ...]
    hidden: int
    width: int
    vocab: int
    layers: int
    prompt: int


GPU = Sizes((1, 8, 64, 2048), hidden=4096, width=14336, vocab=32000, layers=4, prompt=512)
TRIED = Sizes((1, 3), hidden=64, width=96, vocab=128, layers=2, prompt=9)


class Case(NamedTuple):
    name: str
    shapes: tuple[tuple[int, ...], ...]
    by_torch: Callable[..., object]
    ours: Callable[..., object] | None = None  # of a fused op; None: the same call, with aten replaced


def cases(sizes: Sizes) -> Iterator[Case]:
    hidden, width = sizes.hidden, sizes.width
    fused = torch.ops.lightserve
    for rows in sizes.rows:
        x = (rows, hidden)
        yield Case("silu", ((rows, width),), F.silu)
        yield Case("gelu", ((rows, width),), F.gelu)
        yield Case("relu", ((rows, width),), F.relu)
        yield Case("layer_norm", (x, (hidden,), (hidden,)), lambda x, w, b: F.layer_norm(x, w.shape, w, b))
        yield Case("rms_norm", (x, (hidden,)), lambda x, w: F.rms_norm(x, w.shape, w, 1e-5))
        yield Case("mm", (x, (width, hidden)), F.linear)
        yield Case("addmm", (x, (hidden, hidden), (hidden,)), F.linear)
        yield Case("add_rms_norm", (x, x, (hidden,)), _add_norm, lambda x, r, w: fused.add_rms_norm(x, r, w, 1e-5))
        yield Case("silu_and_mul", ((rows, 2 * width),), _silu_and_mul, fused.silu_and_mul)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(residual.add_(x), weight.shape, weight, 1e-5)


def _silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def microseconds(call: Callable[..., object], case: Case, dtype: torch.dtype, device: torch.device) -> float:
    num_bytes = sum(torch.Size(shape).numel() for shape in case.shapes) * dtype.itemsize
    copies = max(2, min(MAX_COPIES, ROTATED_BYTES // num_bytes)) if device.type != "cpu" else 2
    inputs = [[torch.randn(shape, device=device, dtype=dtype) for shape in case.shapes] for _ in range(copies)]
    return seconds_per_call([partial(call, *args) for args in inputs], device, repeats=5) * 1e6


def flag_gems() -> Callable[[], AbstractContextManager[Any]] | None:
    if find_spec("flag_gems") is None:
        return None
    use: Callable[[], AbstractContextManager[Any]] = import_module("flag_gems").use_gems
    return use


def table(platform: Device, device: torch.device, sizes: Sizes) -> None:
    gems, dtype = flag_gems(), platform.dtypes[0]
    with lightserve.ops.use_ops(device=platform.name) as replaced:
        print(f"replaced on {platform.name}: {', '.join(replaced)}")
    print(f"FlagGems: {'installed' if gems else 'not installed'}; us of a call in {dtype}")
    print(f"{'op':14} {'rows':>6} {'torch':>9} {'ours':>9} {'gain':>7}{'FlagGems':>10}")
    for case in cases(sizes):
        torch_us = microseconds(case.by_torch, case, dtype, device)
        with lightserve.ops.use_ops(device=platform.name):
            ours_us = microseconds(case.ours or case.by_torch, case, dtype, device)
        row = f"{case.name:14} {case.shapes[0][0]:>6} {torch_us:9.2f} {ours_us:9.2f} {torch_us / ours_us:6.2f}x"
        if gems is not None:
            with gems():
                row += f"{microseconds(case.by_torch, case, dtype, device):10.2f}"
        print(row, flush=True)


def model_of(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=max(sizes.hidden // 128, 2),
        num_key_value_heads=max(sizes.hidden // 512, 1),
        vocab_size=sizes.vocab,
    )
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def compare_model(platform: Device, device: torch.device, sizes: Sizes) -> None:
    """A prompt and decode steps of one request, with aten and with it replaced."""
    dtype = platform.dtypes[0]
    model = model_of(sizes, dtype, device)
    ids = torch.randint(0, sizes.vocab, (1, sizes.prompt), device=device)
    results = {}
    for name, context in (("torch", nullcontext()), ("ours", lightserve.ops.use_ops(device=platform.name))):
        with context, torch.no_grad():
            results[name] = _run(model, ids, platform)
    (wanted, *torch_ms), (actual, *ours_ms) = results["torch"], results["ours"]
    error = float((actual - wanted).norm() / wanted.norm())
    print(
        f"\ntransformers' Llama of {sizes.layers} layers, {sizes.hidden} wide, in {dtype}: logits differ by {error:.1e}"
    )
    for what, before, after in zip((f"prompt of {sizes.prompt}", "decode step"), torch_ms, ours_ms, strict=True):
        print(f"{what:16} torch {before:8.2f} ms, ours {after:8.2f} ms, {before / after:.2f}x")


def _run(model: Any, ids: Tensor, platform: Device) -> tuple[Tensor, float, float]:
    """Logits, and the milliseconds of a prompt and of a decode step behind it."""
    out = model(ids, use_cache=True)
    step_ids = ids[:, :1]
    for _ in range(2):  # kernels compile
        model(ids)
        model(step_ids, past_key_values=out.past_key_values)
    prompt_s = min(_seconds(lambda: model(ids)) for _ in range(3))
    step_s = min(_seconds(lambda: model(step_ids, past_key_values=out.past_key_values)) for _ in range(8))
    return out.logits.float().cpu(), prompt_s * 1e3, step_s * 1e3


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work().logits[0, -1, 0].item()  # waits for the device
    return time.perf_counter() - begin


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda; omitted: the best one here")
    platform = pick_device(parser.parse_args(argv).device)
    device = platform.torch_device(0)
    sizes = TRIED if platform.name == "cpu" else GPU
    with torch.no_grad():
        table(platform, device, sizes)
    compare_model(platform, device, sizes)


if __name__ == "__main__":
    main()
