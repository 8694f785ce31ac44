"""The checks of ``lightserve doctor``. Each looks at one part of the machine and never changes it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from lightserve.errors import LightserveError
from lightserve.model_files.hub.settings import hub_cache, read_settings
from lightserve.utils import drivers, net
from lightserve.utils.cpu import available_cores
from lightserve.utils.extras import install_command
from lightserve.utils.memory import free_ram
from lightserve.utils.progress import format_bytes

DRIVER_ANSWERS_S = 20.0
# Instructions that a kernel of torch or of our C library uses, by their names in /proc/cpuinfo, best last
INSTRUCTIONS = (
    *("asimddp", "i8mm", "sve", "bf16"),  # Arm
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8"),  # x86
)
WEIGHT_SHARE = 0.6  # of the free memory: the rest is for the KV pool and other programs
LOW_DISK = 20e9  # bytes: a model of 8 billion parameters takes 16 GB


@dataclass(frozen=True)
class Finding:
    text: str
    remedy: str = ""  # what to do; "": nothing is missing
    is_fatal: bool = False  # the server cannot start


def check_python(port: int) -> Finding:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.prefix}"
    return Finding(text)


def check_torch(port: int) -> Finding:
    try:
        import torch
    except Exception as error:  # also an OSError of a broken library
        return Finding(f"cannot be imported ({error})", "pip install torch", is_fatal=True)
    built_for = {"cuda": torch.version.cuda, "rocm": torch.version.hip}  # the version of each, or None
    gpus = " and ".join(f"{name} {version}" for name, version in built_for.items() if version)
    text = f"{torch.__version__}, for {gpus or 'CPUs only'}"
    missing = [name for name in drivers.loaded_drivers() if not built_for[name]]
    return Finding(text, f"this machine has a GPU; install a torch that is built for {missing[0]}" if missing else "")


def check_cores(port: int) -> Finding:
    instructions = [name for name in INSTRUCTIONS if name in _cpu_features()]
    return Finding(
        f"{available_cores()} of {os.cpu_count()}, {' '.join(instructions) or 'no vector instructions known to us'}"
    )


def _cpu_features() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return set()
    return set(" ".join(re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)).split())


def check_c_library(port: int) -> Finding:
    from lightserve.common.cpu_kernel._library import library  # imports torch

    if library is None:
        return Finding("not built; a CPU computes with torch alone", "install g++, then install lightserve again")
    return Finding(f"built, uses the variant {library.ls_variant().decode()} on this CPU")


def check_gpu(port: int) -> Finding:
    loaded = drivers.loaded_drivers()
    if not loaded:
        return _device_of_package() or Finding("none; the CPU computes")
    name, driver = next(iter(loaded.items()))
    try:
        done = subprocess.run(driver.query, capture_output=True, text=True, timeout=DRIVER_ANSWERS_S, check=True)
        text = "; ".join(" ".join(line.split()) for line in done.stdout.splitlines())
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(f"its driver does not answer ({error})", f"check it with {driver.query[0]}")
    import torch

    from lightserve.common.device import device_named

    gpu = device_named(name)
    if gpu.unavailable_reason() is not None:
        return Finding(text, f"torch cannot use it; install a torch that is built for this driver's {name}")
    return Finding(f"{text}, {gpu.describe(torch.device(gpu.torch_type, 0))}")


def _device_of_package() -> Finding | None:
    """What a server takes by itself, of the devices that other packages bring."""
    from lightserve.common.device import pick_device, unusable_packages  # imports torch

    platform = pick_device()
    if platform.name == "cpu":
        reasons = "; ".join(f"{name}: {reason}" for name, reason in unusable_packages().items())
        return Finding("none usable; the CPU computes", reasons) if reasons else None
    device = platform.torch_device(0)
    described = platform.describe(device)
    text = f"{platform.name}: {platform.profile(device).name}{f', {described}' if described else ''}"
    problem = None if platform.driver is None else platform.driver.problem(device)
    return Finding(text) if problem is None else Finding(text, f"{platform.name}: {problem}", is_fatal=True)


def check_triton(port: int) -> Finding:
    has_gpu = bool(drivers.loaded_drivers())
    try:
        triton_version = version("triton")
    except PackageNotFoundError:
        remedy = f"a GPU needs it: {install_command('gpu')}" if has_gpu else ""
        return Finding("not installed" + ("" if has_gpu else "; a CPU does not need it"), remedy, is_fatal=has_gpu)
    if has_gpu and shutil.which("gcc") is None and shutil.which("cc") is None:
        return Finding(triton_version, "no C compiler, which triton calls; install gcc")
    return Finding(triton_version + ("" if has_gpu else "; a CPU does not need it"))


def check_fast(port: int) -> Finding:
    """Which weights are fast here: docs/quantization.md has the measurements."""
    import torch

    from lightserve.common.cpu_kernel._library import library
    from lightserve.common.device import pick_device

    gpu = pick_device()
    if gpu.name != "cpu":
        has_fp8 = gpu.traits(torch.device(gpu.torch_type, 0)).has_dot(torch.float8_e4m3fn)
        smaller = "fp8" if has_fp8 else "int8"
        return Finding(f"bfloat16 on the GPU, or half its bytes with --quantization {smaller}")
    if library is not None:
        return Finding("a .gguf file in 4 bits with --quantization gguf: several times faster than float32")
    return Finding("models below 1 billion parameters in float32; larger ones need the C library")


def check_memory(port: int) -> Finding:
    total, free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), free_ram()
    billions = WEIGHT_SHARE * free / 1e9
    sizes = f"room for about {billions / 4:.1f} billion parameters in float32, {billions / 0.6:.1f} in 4 bits"
    return Finding(f"{format_bytes(free)} free of {format_bytes(total)}; {sizes}")


def check_disk(port: int) -> Finding:
    folder = hub_cache()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    text = f"{format_bytes(free)} free for {folder}"
    if not os.access(existing, os.W_OK):
        return Finding(text, "you may not write there; set HF_HOME to another folder")
    return Finding(text, "little for models; set HF_HOME to a larger disk" if free < LOW_DISK else "")


def check_port(port: int) -> Finding:
    try:
        net.bind("127.0.0.1", port).close()
    except LightserveError as error:
        problem, _, _ = str(error).partition("; ")
        return Finding(problem, "set another --port")
    return Finding(f"{port} is free")


def check_hub(port: int) -> Finding:
    settings = read_settings()
    token = "a token" if os.environ.get("HF_TOKEN") or _token_file().is_file() else "no token"
    if find_spec("huggingface_hub") is None:
        return Finding(f"{settings.endpoint}, {token}", "huggingface_hub is missing: models by name need it")
    if settings.is_offline:
        return Finding(f"offline (HF_HUB_OFFLINE), {token}; only models in the cache can be served by name")
    return Finding(f"{settings.endpoint}, {token} (needed for gated models only)")


def _token_file() -> Path:
    if path := os.environ.get("HF_TOKEN_PATH"):
        return Path(path).expanduser()
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "token"


CHECKS: dict[str, Callable[[int], Finding]] = {
    "python": check_python,
    "torch": check_torch,
    "cores": check_cores,
    "C library": check_c_library,
    "GPU": check_gpu,
    "triton": check_triton,
    "memory": check_memory,
    "disk": check_disk,
    "port": check_port,
    "hub": check_hub,
    "fast here": check_fast,
}
