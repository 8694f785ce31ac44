import runpy
from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="lightserve",
    version=runpy.run_path("lightserve/__init__.py")["__version__"],
    description="A server for large language models: token-granular KV memory, Triton kernels, a laptop or a GPU",
    long_description=Path("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["lightserve", "lightserve.*"]),
    package_data={
        "lightserve.benchmark": ["perplexity.txt"],
        "lightserve.httpserver.web": ["chat/*", "docs/*"],
    },
    install_requires=[
        "fastapi>=0.115",
        "gguf>=0.17",
        "httptools>=0.6",
        "jinja2>=3.1",
        "llguidance>=1.7",
        "msgspec>=0.19",
        "numpy>=2",
        "orjson>=3.10",
        "prometheus-client>=0.20",
        "pyzmq>=26",
        "rpyc>=6",
        "safetensors>=0.5",
        "tokenizers>=0.22",
        "torch>=2.11,<2.14",
        "uvicorn>=0.30",
        "uvloop>=0.20",
    ],
    extras_require={
        "gpu": ["triton>=3.6"],
        "hf": ["transformers>=5.17"],  # tokenizers in a folder's own Python: --trust_remote_code
        "test": [
            "accelerate",
            "aiohttp",
            "anthropic",
            "axe-core-python",
            "hypothesis",
            "jsonschema-rs",
            "matplotlib",
            "mypy",
            "openai",
            "pytest",
            "pytest-xdist",
            "ruff",
            "schemathesis",
            "selenium",
            "transformers>=5.17",
            "triton>=3.6",
        ],
    },
    entry_points={"console_scripts": ["lightserve = lightserve.generate:main"]},
)
