"""A package imports only packages below it. The table here is the architecture."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "lightserve"

GROUND = {"errors", "utils", "config", "messages", "ipc"}
HTTP_GROUND = {"httpserver.context", "httpserver.engine_client", "httpserver.http", "httpserver.prompt_request"}
HTTP_API = {*HTTP_GROUND, "mcp", "errors", "httpserver.fields", "text.logprobs", "messages", "model_files"}
# name: what it may import from lightserve besides itself
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "utils": set(),
    "links.kv_secret": {"errors", "links.tls"},
    "utils.net": {"errors"},
    "utils.spelling": set(),
    "links.tls": {"errors"},
    "ipc": {"errors", "config", "messages", "utils"},
    "config": {"errors", "utils"},
    "messages": {"errors", "utils.spelling"},
    "batches": {"errors"},
    "model_files": {"errors", "messages", "utils"},
    "model_files.config.facts": {"config", "model_files"},
    "model_files.speculation": {"config", "errors", "model_files"},
    "model_files.config.text_part": {"errors"},
    "model_files.lora": {"errors", "model_files.config.text_part", "model_files.safetensors_header"},
    "model_files.safetensors_header": {"errors"},
    "media": {"errors", "messages", "model_files"},
    "media.reader": {"errors", "media", "messages", "outbound"},
    "media.audio": {"errors", "media", "model_files", "utils"},
    "media.fetch": {"errors", "outbound"},
    "outbound": {"errors"},
    "mcp": {"errors", "outbound", "utils"},
    "media.sources": {"media.sizes"},
    "media.sizes": set(),
    "media.tokens": {"errors", "media.sizes", "messages"},
    "encoder": {*GROUND, "common", "media", "model_files", "vision"},
    "audio": {"errors", "media", "model_files", "vision"},
    "vision": {"errors", "common.checkpoint", "common.ops", "media", "model_files"},
    "text": set(),
    "text.json_schema": {"errors", "utils"},
    "text.parsing": {"errors", "text.json_schema"},
    "text.grammar": {"errors", "messages", "text.json_schema", "model_files", "utils", "ipc"},
    "router.kv.slots": set(),
    "common.ops": set(),
    "common.triton_kernel": {"common.ops", "common.device.profile"},
    "common.cpu_kernel": {"utils", "common.ops"},
    "common.compile": {"utils"},
    "common.compile.server": {"utils", "common.compile", "common.triton_kernel"},
    "common.device": {"errors", "messages", "utils", "common.compile", "common.ops"},
    "common.device.profile": {"messages"},
    "common.parallel": {"common.device"},
    "common.checkpoint": {"common.device", "errors", "model_files"},
    "common.quantization": {"common.checkpoint", "common.ops", "errors", "model_files"},
    "common.kv": set(),
    "common.basemodel": {
        "errors",
        "utils",
        "common.checkpoint",
        "common.kv",
        "common.ops",
        "common.parallel",
        "common.quantization",
        "model_files",
    },
    "models": {"errors", "common.basemodel", "common.ops"},
    "models.registry": {"errors", "model_files", "common.basemodel", "utils"},
    "models.served_config": {"errors", "model_files", "models.registry", "utils"},
    "models.transformers_backend": {"errors", "common.basemodel", "common.ops", "model_files"},
    "router.kv.identity": {*GROUND, "links", "model_files"},
    "router.read_pinned_prefixes": {*GROUND, "model_files"},
    "router": {*GROUND, "links", "media.tokens", "router.kv.slots", "model_files.lora"},
    "worker": {*GROUND, "common", "text.grammar", "models", "model_files", "links.tls", "links.kv_secret"},
    "detokenization": {*GROUND, "model_files"},
    "httpserver.http": {"errors", "messages", "utils"},
    "text.logprobs": {"messages"},
    "httpserver.tracing": {"errors", "httpserver.http", "messages", "utils", "ipc"},
    "httpserver.prompt_request": {"messages"},
    "httpserver.weight_versions": {"messages"},
    "httpserver.routed_experts": {"errors", "httpserver.context", "messages"},
    "httpserver.engine_state": set(),
    "httpserver.router_queries": {"errors", "messages", "utils", "ipc"},
    "httpserver.grammar.memory": {"errors", "messages"},
    "httpserver.engine_client": {
        "errors",
        "httpserver.engine_state",
        "httpserver.prompt_request",
        "httpserver.grammar.memory",
        "httpserver.router_queries",
        "httpserver.weight_versions",
        "httpserver.http",
        "messages",
        "utils",
        "ipc",
    },
    "httpserver.resume": {"errors", "httpserver.http", "messages", "utils", "ipc"},
    "httpserver.grammar.check": {
        "errors",
        "text.grammar",
        "messages",
        "model_files",
        "utils",
        "ipc",
    },
    "httpserver.context": {
        "batches",
        "config",
        "errors",
        "httpserver.grammar.check",
        "httpserver.resume",
        "httpserver.engine_client",
        "httpserver.tracing",
        "httpserver.rl.settings",
        "httpserver.http",
        "mcp",
        "media.reader",
        "messages",
        "model_files",
        "outbound",
    },
    "httpserver.rl.settings": {"config"},
    "text.beam_search": {"errors", "messages"},
    "httpserver.beam_search": {*HTTP_GROUND, "messages", "model_files", "text.beam_search"},
    "httpserver.fields": {
        *HTTP_GROUND,
        "errors",
        "text.grammar",
        "text.beam_search",
        "media",
        "messages",
        "model_files",
        "text.parsing",
    },
    "httpserver.chat": {
        *HTTP_GROUND,
        "errors",
        "text.grammar",
        "httpserver.fields",
        "mcp",
        "media.reader",
        "media.sizes",
        "media.sources",
        "messages",
        "text.json_schema",
        "model_files",
        "text.parsing",
    },
    "httpserver.openai": {
        *HTTP_API,
        "httpserver.beam_search",
        "httpserver.chat",
        "httpserver.weight_versions",
        "text.parsing",
        "utils",
    },
    "httpserver.audio": {*HTTP_API, "httpserver.chat", "media.audio", "media.reader", "media.sources"},
    "httpserver.anthropic": {*HTTP_API, "httpserver.chat", "utils"},
    "httpserver.ollama": {*HTTP_API, "httpserver.chat", "httpserver.pooling", "text.parsing"},
    "httpserver.generate.lightllm": {*HTTP_API, "httpserver.beam_search", "media", "text.beam_search"},
    "httpserver.generate.tgi": {*HTTP_API, "media.sources"},
    "httpserver.generate.sglang": {
        *HTTP_API,
        "httpserver.routed_experts",
        "httpserver.weight_versions",
        "media.sources",
    },
    "httpserver.pooling": {*HTTP_API, "httpserver.generate.tgi"},
    "httpserver.generate": {
        *HTTP_GROUND,
        "errors",
        "httpserver.generate.lightllm",
        "httpserver.generate.sglang",
        "httpserver.generate.tgi",
    },
    "httpserver.admin": {
        *HTTP_GROUND,
        "batches",
        "errors",
        "httpserver.chat",
        "httpserver.fields",
        "httpserver.generate.lightllm",
        "httpserver.generate.tgi",
        "messages",
        "model_files",
        "utils",
    },
    "httpserver.batches": {*HTTP_GROUND, "batches", "errors", "messages", "utils"},
    "httpserver.rl": {
        *HTTP_API,
        "httpserver.routed_experts",
        "httpserver.weight_versions",
        "config",
        "httpserver.admin",
        "httpserver.fields",
        "httpserver.openai",
        "httpserver.router_queries",
        "utils",
    },
    "httpserver.web": {*HTTP_GROUND, "httpserver.pooling"},
    "httpserver": {"batches", "config", "media", "messages", "model_files", "outbound", "utils", "ipc", "links.tls"},
    "cluster.routing": {"errors"},
    "links": {*GROUND, "model_files"},
    "cluster.nodes": {*GROUND, "links", "model_files"},
    "cluster.proxy": {*GROUND},
    "cluster": {*GROUND, "links", "media.tokens", "model_files"},
    "server": {
        *GROUND,
        "batches",
        "cluster.nodes",
        "cluster.routing",
        "links",
        "media",
        "model_files",
        "models.registry",
        "models.served_config",
        "router",
    },
    "simulate": {*GROUND, "router", "cluster"},
    "offline": {
        *GROUND,
        "encoder",
        "media",
        "common.device",
        "common.parallel",
        "detokenization",
        "text.beam_search",
        "text.grammar",
        "text.logprobs",
        "model_files",
        "outbound",
        "models.registry",
        "models.served_config",
        "router",
        "server",
        "utils",
        "worker",
    },
    "llm": {"offline"},
    "ray": {*GROUND, "cluster.proxy", "links", "server"},
    "cli": {
        *GROUND,
        "batches",
        "links",
        "common.cpu_kernel",
        "common.device",
        "model_files",
        "models.registry",
        "ray",
        "server",
    },
    "parity": {*GROUND, "common", "model_files", "offline", "tools", "worker"},
    "parity.compare": set(),
    "conformance": {*GROUND, "bench", "common", "offline", "parity"},
    "conformance.inputs": {"common.ops"},
    "ops": {"common.device", "common.ops", "errors", "utils"},
    "tools": {*GROUND, "common", "model_files", "models.registry", "worker"},
    "bench": {*GROUND, "common", "offline", "model_files", "models.registry", "server", "tools"},
}
TORCH_FREE = [
    "bench.compare",
    "bench.serve",
    "cli.chat.main",
    "cli.completion.main",
    "cli.doctor",
    "cli.models",
    "conformance.main",
    "cluster",
    "common.compile.cache",
    "common.compile.client",
    "router.kv.slots",
    "config",
    "detokenization.req_text",
    "errors",
    "text.grammar.compiler",
    "text.grammar.process",
    "text.beam_search",
    "text.logprobs",
    "messages",
    "text.json_schema.tool_schema",
    "model_files.hub.transfer",
    "model_files.config.model_config",
    "model_files.source",
    "model_files.tokenizer.tokenizer",
    "text.parsing",
    "router",
    "server.api_server",
    "simulate.simulation",
    "utils.logger",
    "messages.metrics",
    "ipc.process",
    "utils.progress",
    "ipc.worker_calls",
]
MAY_USE_CUDA = ("common.device.cuda", "common.triton_kernel")  # cuda.py and its parts, cuda_graph.py and others
CUDA_TEXT = re.compile(r"(torch\.)?cuda([.:]\S*)?")
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def layer_of(module: str) -> str:
    """The longest declared prefix of a dotted name under lightserve."""
    matches = [layer for layer in LAYERS if module == layer or module.startswith(layer + ".")]
    assert matches, f"lightserve.{module} belongs to no layer; add it to LAYERS"
    return max(matches, key=len)


@cache
def imports(path: Path) -> tuple[str, ...]:
    return tuple(imports_of(ast.parse(path.read_text())))


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
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


def imports_upwards(path: Path) -> Iterator[str]:
    here = layer_of(dotted(path))
    allowed = LAYERS[here] | {here}
    for name in imports(path):
        if name.startswith("lightserve.") and name != "lightserve.__version__":
            there = layer_of(name.removeprefix("lightserve."))
            if not any(is_within(there, layer) for layer in allowed):
                yield f"{path}: {here} may not import {there}"


def test_imports_go_down() -> None:
    assert [wrong for path in modules() if path != ROOT / "__init__.py" for wrong in imports_upwards(path)] == []


def imported_at_run_time(path: Path) -> Iterator[str]:
    """Imports outside of ``if TYPE_CHECKING:``."""
    if "TYPE_CHECKING" not in path.read_text():
        yield from imports(path)
        return
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    yield from imports_of(tree)


def module_of(name: str, known: set[str]) -> str | None:
    """The module that an imported name is or belongs to; None: a package without code, or no module of ours."""
    parts = name.split(".")
    prefixes = [".".join(parts[:end]) for end in range(len(parts), 1, -1)]
    return next((prefix for prefix in prefixes if prefix in known), None)


def test_no_module_imports_itself_through_others() -> None:
    paths = {f"lightserve.{dotted(path)}": path for path in modules()}
    graph = {
        name: {module_of(imported, set(paths)) for imported in imported_at_run_time(path)} - {None, name}
        for name, path in paths.items()
    }
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail("an import cycle: " + " <- ".join(error.args[1]))


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


def uses_cuda(tree: ast.AST) -> Iterator[str]:
    """``torch.cuda`` under any name, in an annotation too, tensors that move to CUDA, and comparisons with its name."""
    names = {id(key) for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}  # of --device
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="cuda" | "is_cuda") if ast.unparse(node) != "torch.version.cuda":
                yield f"line {node.lineno}"
            case ast.Constant(value=str(text)) if CUDA_TEXT.fullmatch(text) and id(node) not in names:
                yield f"line {node.lineno}"
    yield from (name for name in imports_of(tree) if is_within(name, "torch.cuda"))


def test_only_the_device_and_the_kernels_use_cuda() -> None:
    for path in modules():
        text = path.read_text()
        if not dotted(path).startswith(MAY_USE_CUDA) and re.search(r"cuda\b", text):
            assert list(uses_cuda(ast.parse(text))) == [], f"{path}: ask the Device"


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.synchronize()",
        "import torch.cuda",
        "import torch.cuda as c",
        "from torch import cuda",
        "from torch.cuda import Stream",
        "import torch as t; t.cuda.synchronize()",
        "getattr(torch, 'cuda')",
        "import_module('torch.cuda')",
        "x.to('cuda:0')",
        "x.cuda()",
        "x.is_cuda",
        "x.device.type == 'cuda'",
    ],
)
def test_each_use_of_cuda_would_be_found(source: str) -> None:
    assert len(list(uses_cuda(ast.parse(source)))) == 1


def test_names_of_devices_and_versions_are_no_use_of_cuda() -> None:
    assert list(uses_cuda(ast.parse("built_for = {'cuda': torch.version.cuda}"))) == []


def test_only_one_package_imports_ray() -> None:
    """Ray places and watches; nothing on the path of a request may need it."""
    importing = [path for path in modules() if any(name.split(".")[0] == "ray" for name in imports(path))]

    assert importing
    assert {path.parent for path in importing} == {ROOT / "ray"}


def test_nothing_pickles() -> None:
    for path in modules():
        text = path.read_text()

        assert not {name.split(".")[0] for name in imports(path)} & PICKLES, path
        for word in ("recv_pyobj", "send_pyobj", "allow_pickle=True", "weights_only=False"):
            assert word not in text, path


def test_tests_do_not_pickle_either() -> None:
    for path in (ROOT.parent / "test").rglob("*.py"):
        if re.search("|".join(PICKLES), path.read_text()):  # to parse all takes seconds
            assert not {name.split(".")[0] for name in imports(path)} & PICKLES, path


def test_torch_loads_weights_only() -> None:
    for path in modules():
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "load" in text and "torch" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                flags = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert flags.get("weights_only") == "True", f"{path}:{node.lineno}"
