"""A package imports only packages below it. The table here is the architecture."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "lightserve"

GROUND = {"errors", "utils", "config", "io_struct"}
# name: what it may import from lightserve besides itself
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "utils": set(),
    "utils.channel": {"errors"},
    "utils.metrics": {"io_struct"},
    "utils.net": {"errors"},
    "utils.tls": {"errors"},
    "utils.process": {"errors", "config", "io_struct"},
    "config": {"errors"},
    "io_struct": {"errors"},
    "beam_search": {"errors", "io_struct"},
    "prompt_logprobs": {"io_struct"},
    "model_files": {"errors", "utils"},
    "output_parsing": {"errors"},
    "grammar": {"errors", "io_struct", "model_files"},
    "common.kv.token_slots": set(),
    "common.ops": set(),
    "common.triton_kernel": {"common.ops", "common.device.profile"},
    "common.cpu_kernel": {"utils", "common.ops"},
    "common.compile": {"utils"},
    "common.compile.server": {"utils", "common.compile", "common.triton_kernel"},
    "common.device": {"errors", "io_struct", "utils", "common.compile", "common.ops"},
    "common.device.profile": {"io_struct"},
    "common.tp": set(),
    "common.checkpoint": {"errors", "model_files"},
    "common.kv": {"model_files"},
    "common.basemodel": {
        "errors",
        "utils",
        "common.checkpoint",
        "common.kv",
        "common.ops",
        "common.tp",
        "model_files",
    },
    "models": {"errors", "common.basemodel", "common.ops"},
    "models.registry": {"errors", "common.basemodel"},
    "router": {*GROUND, "common.kv.token_slots"},
    "worker": {*GROUND, "common", "grammar", "models", "model_files"},
    "detokenization": {*GROUND, "model_files"},
    "httpserver": {
        *GROUND,
        "beam_search",
        "grammar",
        "model_files",
        "output_parsing",
        "prompt_logprobs",
    },
    "server": {*GROUND, "model_files", "models.registry"},
    "simulate": {*GROUND, "router"},
    "llm": {
        *GROUND,
        "beam_search",
        "common.tp",
        "detokenization",
        "model_files",
        "prompt_logprobs",
        "router",
        "worker",
    },
    "generate": {*GROUND, "llm", "server"},
    "tools": {*GROUND, "common", "model_files", "worker"},
    "benchmark": {
        *GROUND,
        "common",
        "grammar",
        "llm",
        "model_files",
        "models",
        "router",
        "server",
        "simulate",
        "tools",
        "worker",
    },
}
TORCH_FREE = [
    "beam_search",
    "common.compile.cache",
    "common.compile.processes",
    "common.kv.token_slots",
    "config",
    "detokenization.stop",
    "errors",
    "grammar.compiler",
    "io_struct",
    "model_files.model_config",
    "model_files.source",
    "model_files.tokenizer",
    "output_parsing",
    "prompt_logprobs",
    "router",
    "server.api_server",
    "simulate.simulation",
    "utils.logger",
    "utils.metrics",
    "utils.process",
    "utils.progress",
]
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def layer_of(module: str) -> str:
    """The longest declared prefix of a dotted name under lightserve."""
    matches = [layer for layer in LAYERS if module == layer or module.startswith(layer + ".")]
    assert matches, f"lightserve.{module} belongs to no layer; add it to LAYERS"
    return max(matches, key=len)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules() -> list[Path]:
    return [p for p in ROOT.rglob("*.py") if p.read_text().strip()]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def is_within(module: str, layer: str) -> bool:
    return module == layer or module.startswith(layer + ".")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    if path == ROOT / "__init__.py":
        return
    here = layer_of(dotted(path))
    allowed = LAYERS[here] | {here}
    for name in imports(path):
        if name.startswith("lightserve.") and name != "lightserve.__version__":
            there = layer_of(name.removeprefix("lightserve."))
            assert any(is_within(there, layer) for layer in allowed), f"{here} may not import {there}"


def test_no_module_is_named_twice_in_the_table() -> None:
    for layer, below in LAYERS.items():
        assert layer not in below
        for name in below:
            assert name in LAYERS or any(known.startswith(name + ".") for known in LAYERS), f"{name} is no layer"


def test_the_documented_table_has_every_package() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    floors = page.partition("## The floors")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w.]+)`", floors))

    missing = [layer for layer in LAYERS if not any(is_within(layer, name) for name in named)]
    assert not missing


def test_torch_free_modules_do_not_import_torch_even_indirectly() -> None:
    program = f"""
import importlib, sys
for name in {TORCH_FREE!r}:
    importlib.import_module("lightserve." + name)
    heavy = [m for m in ("torch", "triton", "transformers") if m in sys.modules]
    assert not heavy, f"lightserve.{{name}} imports {{heavy}}"
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent, capture_output=True, text=True)

    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_pickles(path: Path) -> None:
    text = path.read_text()

    assert not {name.split(".")[0] for name in imports(path)} & PICKLES
    assert "recv_pyobj" not in text
    assert "send_pyobj" not in text
    assert "allow_pickle=True" not in text
    assert "weights_only=False" not in text


def test_tests_do_not_pickle_either() -> None:
    for path in (ROOT.parent / "test").rglob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & PICKLES, path


def test_torch_loads_weights_only() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                flags = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert flags.get("weights_only") == "True", f"{path}:{node.lineno}"
