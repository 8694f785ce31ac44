"""What replaced aten operators and fused ones gain: torch, ours, and FlagGems if it is installed.

    python -m benchmark.kernels.aten                       # a GPU; --device cpu tries it on tiny shapes
    python -m benchmark.kernels.aten --only mm sample      # without the model

Calls are replayed as a graph over more memory than the cache holds. The model is transformers' Llama with random
weights, called step by step, with the launches of Python.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import lightserve.ops
from benchmark.kernels.aten_cases import GPU, TRIED, Case, Sizes, cases
from lightserve.bench.ceilings import seconds_per_call
from lightserve.bench.kernel_cases import InputFactory
from lightserve.common.device import Device, pick_device

ROTATED_BYTES = 256 * 2**20
MAX_COPIES = 64
SLOWER = 1.05  # than torch, which the table then says


def microseconds(call: Callable[..., object], case: Case, dtype: torch.dtype, device: torch.device) -> float:
    new = InputFactory(device, dtype)
    inputs = [case.inputs(new)]
    num_bytes = sum(tensor.nbytes for tensor in inputs[0] if isinstance(tensor, Tensor))
    copies = max(2, min(MAX_COPIES, ROTATED_BYTES // num_bytes)) if device.type != "cpu" else 2
    inputs += [case.inputs(new) for _ in range(copies - 1)]
    return seconds_per_call([partial(call, *args) for args in inputs], device, repeats=5) * 1e6


def flag_gems() -> Callable[[], AbstractContextManager[Any]] | None:
    if find_spec("flag_gems") is None:
        return None
    use: Callable[[], AbstractContextManager[Any]] = import_module("flag_gems").use_gems
    return use


def table(platform: Device, device: torch.device, measured: Iterable[Case]) -> None:
    gems, dtype, slower = flag_gems(), platform.dtypes[0], []
    names = list(lightserve.ops.ATEN)
    with lightserve.ops.use_ops(names, device=platform.name) as replaced:
        print(f"replaced on {platform.name}: {', '.join(replaced)}")
    print(f"FlagGems: {'installed' if gems else 'not installed'}; us of a call in {dtype}")
    print(f"{'op':18} {'rows':>6} {'torch':>9} {'ours':>9} {'gain':>7}{'FlagGems':>10}")
    for case in measured:
        torch_us = microseconds(case.by_torch, case, dtype, device)
        with lightserve.ops.use_ops(names, device=platform.name):
            ours_us = microseconds(case.ours or case.by_torch, case, dtype, device)
        row = f"{case.name:18} {case.rows:>6} {torch_us:9.2f} {ours_us:9.2f} {torch_us / ours_us:6.2f}x"
        if gems is not None:
            with gems():
                row += f"{microseconds(case.by_torch, case, dtype, device):10.2f}"
        print(row, flush=True)
        if ours_us > SLOWER * torch_us:
            slower.append(f"{case.name} of {case.rows}")
    print(f"slower than torch by more than {SLOWER - 1:.0%}: {', '.join(slower) or 'none'}")


def model_of(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        vocab_size=sizes.vocab,
    )
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def compare_model(platform: Device, device: torch.device, sizes: Sizes) -> None:
    """A prompt and decode steps of one request, with aten and with what ``enable`` replaces."""
    dtype = platform.dtypes[0]
    model = model_of(sizes, dtype, device)
    ids = torch.randint(0, sizes.vocab, (1, sizes.prompt), device=device)
    results = {}
    for name, context in (("torch", nullcontext(list[str]())), ("ours", lightserve.ops.use_ops(device=platform.name))):
        with context as replaced, torch.no_grad():
            _run(model, ids)  # what is prepared once for each number of keys, by torch too
            results[name] = _run(model, ids)
    (wanted, *torch_ms), (actual, *ours_ms) = results["torch"], results["ours"]
    error = float((actual - wanted).norm() / wanted.norm())
    print(f"\nreplaced: {', '.join(replaced)}")
    print(
        f"transformers' Llama of {sizes.layers} layers, {sizes.hidden} wide, in {dtype}: logits differ by {error:.1e}"
    )
    for what, before, after in zip((f"prompt of {sizes.prompt}", "decode step"), torch_ms, ours_ms, strict=True):
        print(f"{what:16} torch {before:8.2f} ms, ours {after:8.2f} ms, {before / after:.2f}x")


def _run(model: Any, ids: Tensor) -> tuple[Tensor, float, float]:
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
    parser.add_argument("--only", nargs="+", default=[], metavar="OP", help="these rows of the table, and no model")
    options = parser.parse_args(argv)
    platform = pick_device(options.device)
    device = platform.torch_device(0)
    sizes = TRIED if platform.name == "cpu" else GPU
    with torch.no_grad():
        table(platform, device, [case for case in cases(sizes) if not options.only or case.name in options.only])
    if not options.only:
        compare_model(platform, device, sizes)


if __name__ == "__main__":
    main()
