import platform
import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

CSRC = "lightserve/common/cpu_kernel/csrc"
NEON_DOT = ("neon_dot", "LS_HAS_NEON_DOT", ["-march=armv8.2-a+dotprod"])
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512vl", "-mavx512vnni"]
AMX_FLAGS = [*AVX512_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
# For each machine: name, macro and compiler flags of the variants that are chosen if the CPU has their instructions
VARIANTS = {
    "aarch64": [NEON_DOT],
    "arm64": [NEON_DOT],
    "x86_64": [
        ("avx2", "LS_HAS_AVX2", AVX2_FLAGS),
        ("avx512_vnni", "LS_HAS_AVX512_VNNI", AVX512_FLAGS),
        ("amx", "LS_HAS_AMX", AMX_FLAGS),
    ],
}
FLAGS = ["-O3", "-std=c++17", "-fvisibility=hidden", "-ffp-contract=off", "-fno-schedule-insns"]


class BuildCpuKernels(build_ext):
    """Compile the kernels once for every CPU, and once for the instructions of newer ones."""

    def build_extension(self, ext: Extension) -> None:
        objects = self._compile("plain", ["variant.cpp"], [("LS_VARIANT", "plain")], [])
        macros = []
        for name, has_variant, flags in VARIANTS.get(platform.machine(), []):
            try:
                objects += self._compile(name, ["variant.cpp"], [("LS_VARIANT", name)], flags)
            except CompileError:  # of a compiler that is older than these instructions
                continue
            macros.append((has_variant, "1"))
        objects += self._compile("common", ["api.cpp", "threads.cpp"], macros, [])
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), libraries=["pthread"], target_lang="c++"
        )

    def _compile(self, name: str, sources: list[str], macros: list[tuple[str, str]], flags: list[str]) -> list[str]:
        return self.compiler.compile(
            [f"{CSRC}/{source}" for source in sources],
            output_dir=f"{self.build_temp}/{name}",
            macros=macros,
            extra_postargs=FLAGS + flags,
            depends=ext_headers(),
        )


def ext_headers() -> list[str]:
    return sorted(str(path) for path in Path(CSRC).glob("*.h"))


setup(
    name="lightserve",
    version=runpy.run_path("lightserve/__init__.py")["__version__"],
    description="A server for large language models: token-granular KV memory, Triton kernels, a laptop or a GPU",
    long_description=Path("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["lightserve", "lightserve.*"]),
    # A C library, which ctypes loads. Without a compiler the torch forms of its ops remain.
    ext_modules=[
        Extension(
            "lightserve.common.cpu_kernel._native",
            [f"{CSRC}/{source}" for source in ("api.cpp", "threads.cpp", "variant.cpp")],
            depends=ext_headers(),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildCpuKernels},
    package_data={
        "lightserve.common.cpu_kernel": ["csrc/*"],
        "lightserve.common.device": ["csrc/*"],  # compiled when a trainer's server starts on a GPU
        "lightserve.httpserver.web": ["chat/**/*", "docs/*"],
    },
    install_requires=[
        "fastapi>=0.115",
        "gguf>=0.17",
        "h11>=0.14",  # uvicorn installs it too
        "httptools>=0.6",
        "huggingface-hub>=1.5,<3",  # tokenizers installs it too
        "jinja2>=3.1",
        "llguidance>=1.7",
        "msgspec>=0.19",
        "numpy>=2",
        "orjson>=3.10",
        "prometheus-client>=0.20",
        "pyyaml>=6",
        "pyzmq>=26",
        "rpyc>=6",
        "safetensors>=0.5",
        "tokenizers>=0.22",
        "torch>=2.11,<2.14",
        "uvicorn>=0.30",
        "uvloop>=0.20",
    ],
    extras_require={
        "audio": ["soundfile>=0.13"],  # sounds in MP3, FLAC and Ogg
        "docs": ["mkdocs>=1.6,<2"],
        "gpu": ["triton>=3.6"],
        "images": ["pillow>=11"],  # models that read images
        "nixl": ["nixl>=1.5,<2"],  # KV between engines by RDMA: --kv_transport nixl
        "otlp": ["opentelemetry-proto>=1.27"],  # traces: --otlp_endpoint
        "ray": ["ray[serve]>=2.60,<2.62"],  # lightserve deploy
        "hf": ["transformers>=5.17"],  # --model_impl transformers, and tokenizers in Python: --trust_remote_code
        "test": [
            "accelerate",
            "aiohttp",
            "anthropic",
            "axe-core-python",
            "hypothesis",
            "jsonschema-rs",
            "matplotlib",
            "mkdocs>=1.6,<2",
            "mypy",
            "openai",
            "opentelemetry-proto>=1.27",
            "pytest",
            "pytest-xdist",
            "ruff",
            "schemathesis",
            "selenium",
            "transformers>=5.17",
            "triton>=3.6",
        ],
    },
    entry_points={"console_scripts": ["lightserve = lightserve.cli.main:main"]},
)
