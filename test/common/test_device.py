from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.device import (
    API_VERSION,
    base,
    check_head_dim,
    device_named,
    device_of,
    explain_out_of_memory,
    host_memory,
    pick_device,
    registry,
    shown_name,
)
from lightserve.common.device.cpu import CpuDevice
from lightserve.common.device.cuda import cuda_traits
from lightserve.common.device.rocm import rocm_traits
from lightserve.common.quantization.eight_bit import EightBitFormat
from lightserve.common.triton_kernel.attention._attention import MAX_HEAD_DIM
from lightserve.errors import ServerError
from lightserve.model_files.quantization.eight_bit import EightBitScheme
from test.ops.cases import randn


@pytest.mark.parametrize(
    ("name", "model_dtype", "wanted"),
    [
        ("cpu", "bfloat16", torch.float32),
        ("cpu", None, torch.float32),
        ("cuda", "float16", torch.float16),
        ("cuda", "bfloat16", torch.bfloat16),
        ("cuda", "float32", torch.bfloat16),
        ("cuda", None, torch.bfloat16),
    ],
)
def test_a_gpu_keeps_the_dtype_of_a_half_precision_model(
    name: str, model_dtype: str | None, wanted: torch.dtype
) -> None:
    assert device_named(name).dtype_for(model_dtype) is wanted


def test_a_gpu_without_bfloat16_computes_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)

    assert device_named("cuda").dtype_for("bfloat16") is torch.float16
    assert not device_named("cuda").has_dtype(torch.bfloat16)
    assert device_named("cpu").has_dtype(torch.bfloat16)


def test_a_gpu_without_e4m3_refuses_kv_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, device = device_named("cuda"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))

    with pytest.raises(ServerError, match=r"kv_dtype fp8 needs float8_e4m3fn, which this cuda device .*; use int8"):
        gpu.check_kv_dtype("fp8", device)
    for kv_dtype in (None, "int8"):
        gpu.check_kv_dtype(kv_dtype, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    gpu.check_kv_dtype("fp8", device)


def test_more_ranks_than_gpus_are_refused_with_the_number_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert device_named("cuda").torch_device(1).index == 1
    with pytest.raises(ServerError, match="rank 2 has no GPU of its own: 2 found; tp x pp x dp may be at most 2"):
        device_named("cuda").torch_device(2)


def test_a_head_dim_over_the_limit_of_the_attention_kernels_is_refused() -> None:
    assert device_named("cuda").max_head_dim == MAX_HEAD_DIM

    check_head_dim(device_named("cuda"), MAX_HEAD_DIM)
    check_head_dim(device_named("cpu"), 4096)
    with pytest.raises(ServerError, match="the model's head_dim is 576; attention on cuda takes up to 512; use the"):
        check_head_dim(device_named("cuda"), 576)


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_device_copies_what_is_written_into_memory_of_the_host(name: str) -> None:
    device = torch.device(name)
    memory = host_memory((3, 5), torch.int32, device)

    memory.numpy()[:] = 7

    assert memory.is_pinned() == (name == "cuda")
    assert memory.to(device, non_blocking=True).tolist() == [[7] * 5] * 3


@pytest.mark.parametrize("is_available", [False, True])
def test_the_best_device_is_an_accelerator_if_there_is_one(is_available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)

    assert pick_device().name == ("cuda" if is_available else "cpu")


def test_a_gpu_that_is_not_there_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ServerError, match=r"no CUDA device is usable here: .* use the device cpu"):
        pick_device("cuda")


def test_a_device_without_unique_ids_points_a_trainer_to_gloo() -> None:
    with pytest.raises(ServerError, match="the device cpu joins no communicator by its unique id; use the backend gl"):
        device_named("cpu").join_communicator(bytes(128), 1, 2, torch.device("cpu"))


class FakeNpu(CpuDevice):
    """A device of another package; its tensors are on the CPU for want of the hardware."""

    name = "npu"
    api_version = API_VERSION


class BareGpu(CpuDevice):
    """It runs Triton kernels, and has nothing that only some devices have."""

    name = "bare"
    api_version = API_VERSION
    ops_backend = "triton"
    ops_module = "lightserve.common.triton_kernel"
    uses_library = False

    def torch_device(self, index: int) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Fp8Gpu(BareGpu):
    name = "fp8"

    def traits(self, device: torch.device) -> ops.DeviceTraits:
        return ops.DeviceTraits(dot_dtypes=(torch.float8_e4m3fn,))


class NoDevice:
    pass


class OldDevice(CpuDevice):
    name = "old"
    api_version = 0


class UnversionedDevice(CpuDevice):
    name = "unversioned"


class Incomplete(base.Device):
    name = "incomplete"
    api_version = API_VERSION
    torch_type = "cpu"


class WithoutKernels(CpuDevice):
    name = "bare"
    ops_backend = "nothing"


@pytest.fixture
def other_packages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages that register devices, as pip would have installed them."""
    packages = PACKAGES | getattr(request, "param", {})
    found = [EntryPoint(name, f"{__name__}:{value}", registry.ENTRY_POINTS) for name, value in packages.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == "lightserve.devices" else [])
    registry._loaded.cache_clear()
    monkeypatch.setattr(base, "_bound", None)
    registry._of_type.cache_clear()
    yield
    registry._loaded.cache_clear()
    registry._of_type.cache_clear()
    ops.use_backend(ops.REFERENCE)
    ops.use_traits(ops.DeviceTraits())


PACKAGES = {"npu": "FakeNpu", "bare": "BareGpu", "fp8": "Fp8Gpu", "broken": "NoDevice"}
INCOMPLETE = {"incomplete": "Incomplete", "renamed": "FakeNpu", "gone": "NoSuchClass"}
OUTDATED = {"old": "OldDevice", "unversioned": "UnversionedDevice"}


@pytest.mark.usefixtures("other_packages")
def test_a_device_of_another_package_is_found_by_its_entry_point() -> None:
    device = pick_device("npu")

    assert type(device).__name__ == "FakeNpu"
    device.bind(device.torch_device(0))


@pytest.mark.usefixtures("other_packages")
@pytest.mark.parametrize("name", ["bare", "fp8"])
def test_a_device_of_another_package_gets_the_kernels_that_its_traits_allow(name: str) -> None:
    """fp8 weights are multiplied by rounded inputs, or widened: the products are close to the definition's."""
    device = pick_device(name)
    device.bind(device.torch_device(0))
    fp8 = EightBitFormat(EightBitScheme("fp8", "row", inputs="token")).empty((64, 96), 96, device.torch_device(0))
    int4 = ops.Int4Weight.empty((64, 128), 32, device.torch_device(0))
    generator = torch.Generator(device.torch_device(0)).manual_seed(0)
    for weight in (fp8, int4):
        weight.randomize_(generator, std=0.1)
    x = randn(5, 128, dtype=torch.float16, device=device.torch_device(0).type)

    assert (fp8.input_quant is ops.InputQuant.NONE) == (name == "bare")
    assert_close_to_definition(ops.linear_fp8, x[:, :96].contiguous(), fp8, 0.05 if name == "fp8" else 0.002)
    assert_close_to_definition(ops.linear_int4, x, int4, 0.002)


def assert_close_to_definition(op: Any, x: Tensor, weight: ops.QuantizedWeight, tolerance: float) -> None:
    expected = x.float() @ weight.dequantize().T
    assert (op(x, weight).float() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(
    ("capability", "fp8", "blockwise", "grouped"),
    [
        ((7, 5), False, False, False),
        ((8, 0), False, False, False),
        ((8, 9), True, False, False),
        ((9, 0), True, True, True),
        ((10, 0), True, False, True),
        ((10, 3), True, False, False),
        ((12, 0), True, False, False),
    ],
)
def test_gpus_of_later_generations_have_other_products(
    capability: tuple[int, int], fp8: bool, blockwise: bool, grouped: bool
) -> None:
    traits = cuda_traits(capability)

    assert traits.has_dot(torch.float8_e4m3fn) == fp8
    assert (traits.has_blockwise_mm, traits.has_grouped_mm) == (blockwise, grouped)
    assert traits.has_dot(torch.int8)
    assert traits.has_inline_ptx


@pytest.mark.usefixtures("other_packages")
def test_a_device_of_another_package_is_preferred_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert pick_device().name == "npu"


@pytest.mark.usefixtures("other_packages")
def test_an_unknown_device_is_refused_with_the_names_that_are_known() -> None:
    with pytest.raises(
        ServerError, match=r"'tpu' is not supported; supported: \['bare', 'broken', 'cpu', .*'npu', 'ro"
    ):
        pick_device("tpu")
    with pytest.raises(ServerError, match=r"device 'broken': .*:NoDevice is no subclass of .*Device"):
        pick_device("broken")


@pytest.mark.parametrize(("name", "version"), [("old", "0"), ("unversioned", "None")])
@pytest.mark.parametrize("other_packages", [OUTDATED], indirect=True)
def test_a_device_for_another_version_of_the_interface_is_refused(
    name: str, version: str, other_packages: None
) -> None:
    with pytest.raises(ServerError, match=rf"device '{name}': .* for version {version} of .* this is version 1; ins"):
        device_named(name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "incomplete",
            r"Incomplete lacks ops_backend, .*, launches_async, kv_budget, .*, unavailable_reason; see docs",
        ),
        ("renamed", "FakeNpu has the name 'npu'; its entry point needs the same"),
        ("gone", "NoSuchClass cannot be imported"),
    ],
)
@pytest.mark.parametrize("other_packages", [INCOMPLETE], indirect=True)
def test_a_device_that_is_not_whole_is_refused_with_what_it_lacks(
    name: str, problem: str, other_packages: None
) -> None:
    with pytest.raises(ServerError, match=rf"device '{name}': .*:{problem}"):
        device_named(name)


def test_a_device_without_kernels_of_its_name_is_refused() -> None:
    with pytest.raises(
        ServerError, match=r"device bare: lightserve\.common\.cpu_kernel implements no op for 'nothing'"
    ):
        WithoutKernels().bind(torch.device("cpu"))


@pytest.mark.usefixtures("other_packages")
def test_of_devices_with_tensors_of_one_type_that_of_this_process_is_meant() -> None:
    cpu = torch.device("cpu")
    npu = device_named("npu")

    assert device_of(cpu).name == "cpu"
    npu.bind(cpu)
    assert device_of(cpu) is npu


@pytest.mark.usefixtures("other_packages")
def test_the_gpu_that_this_torch_is_built_for_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(torch.device("cuda")).name == "cuda"

    registry._of_type.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    assert device_of(torch.device("cuda")).name == "rocm"


def test_tensors_of_no_device_are_refused() -> None:
    with pytest.raises(
        ServerError, match=r"no device of this machine has tensors of the type meta; supported: .*'cpu'"
    ):
        device_of(torch.device("meta"))


def test_a_torch_for_rocm_is_not_taken_for_one_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as that torch says

    assert pick_device().name == "rocm"
    with pytest.raises(ServerError, match=r"built for ROCm 6\.4\.1, .* install a torch for CUDA, or use the de"):
        pick_device("cuda")


def test_a_torch_for_cuda_is_not_taken_for_one_for_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    with pytest.raises(ServerError, match="this torch is not built for ROCm: install one that is, or use the device c"):
        pick_device("rocm")
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ServerError, match="no AMD GPU is usable here: check the driver with rocm-smi"):
        pick_device("rocm")


@pytest.mark.parametrize(
    ("arch", "int8", "fp8"),
    [
        ("gfx942:sramecc+:xnack-", True, False),  # its format is float8_e4m3fnuz
        ("gfx950:sramecc+:xnack-", True, True),
        ("gfx1100", False, False),
        ("", False, False),
    ],
)
def test_an_amd_gpu_has_no_assembly_of_nvidia_and_float8_from_gfx950_on(arch: str, int8: bool, fp8: bool) -> None:
    traits = rocm_traits(arch)

    assert (traits.has_dot(torch.int8), traits.has_dot(torch.float8_e4m3fn)) == (int8, fp8)
    assert not traits.has_inline_ptx
    assert not traits.reads_peers


def test_an_amd_gpu_gets_a_profile_by_its_size_and_says_that_it_was_never_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mi300x = SimpleNamespace(
        name="AMD Instinct MI300X",
        multi_processor_count=304,
        total_memory=192 * 2**30,
        shared_memory_per_block=65536,
        gcnArchName="gfx942:xnack-",
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mi300x)
    gpu, device = device_named("rocm"), torch.device("cuda", 7)

    profile = gpu.profile(device)
    assert (profile.name, profile.multiprocessors, profile.shared_bytes) == ("AMD Instinct MI300X", 304, 65536)
    assert profile.graphs is not None
    assert gpu.traits(device).has_dot(torch.int8)
    assert shown_name(gpu) == "rocm (never run on hardware by its authors)"
    assert gpu.comm_backend == "nccl"  # as torch calls RCCL
    with pytest.raises(ServerError, match="the device rocm joins no communicator by its unique id; use the backend gl"):
        gpu.join_communicator(bytes(128), 1, 2, device)


@pytest.mark.parametrize(
    "message",
    [
        "[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8",
        "[enforce fail] posix_memalign. DefaultCPUAllocator: not enough memory: you tried to allocate 8",
    ],
    ids=["x86_64", "aarch64"],
)
def test_a_failed_allocation_on_a_cpu_is_explained(message: str) -> None:
    with (
        pytest.raises(ServerError, match=r"^not enough memory \(.*allocate 8\); buy some$"),
        explain_out_of_memory("buy some"),
    ):
        raise RuntimeError(f"{message}\nmore")


def test_another_error_is_passed_on() -> None:
    with pytest.raises(RuntimeError, match="shapes"), explain_out_of_memory("buy some"):
        raise RuntimeError("shapes do not match")


def test_engines_on_one_cpu_share_its_memory() -> None:
    one, four = CpuDevice(), CpuDevice()
    four.num_parts = 4
    cpu = one.torch_device(0)

    assert 3 < one.kv_budget(cpu, 0.9) / four.kv_budget(cpu, 0.9) < 5  # other programs run
