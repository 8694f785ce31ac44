"""What no line of the server may do, whoever writes it. test_layering.py has more of these, about imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "lightserve"
CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "compile": "makes code of text",
    "__import__": "imports what a text says",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "subprocess.getoutput": "runs a shell",
    "tempfile.mktemp": "names a file that another may make first",
    "yaml.load": "builds any object",
    "yaml.unsafe_load": "builds any object",
    "numpy.load": "may unpickle",
    "np.load": "may unpickle",
    "ssl._create_unverified_context": "trusts anyone",
}
WALL_CLOCKS = ("time.time", "time.time_ns")
FLAGS = {"shell": "runs a shell", "trust_remote_code": "runs the code of a model", "allow_pickle": "unpickles"}
# only with --trust_remote_code
ALLOWED = dict.fromkeys(
    (
        "model_files/tokenizer/files/remote_code.py",
        "model_files/transformers_config.py",
        "models/transformers_backend/loading.py",
        "tools/oracle.py",
    ),
    "trust_remote_code runs the code of a model",
)
TEXTS = {
    "tcp://*": "listens to the network",
    "tcp://0.0.0.0": "listens to the network",
    "lightserve[": "is on no package index; see utils/extras.py",
}
# What kernels may use is asked of ``ops.DeviceTraits``, which a device of any vendor fills in.
VENDOR_QUESTIONS = {
    "get_arch_list",
    "get_current_target",
    "get_device_capability",
    "is_bf16_supported",
    "is_cuda",
    "is_hip",
    "is_xpu",
}
VENDORS = {"cuda", "hip", "rocm", "xpu"}
# the device itself, what `lightserve doctor` shows people, and the target of a compilation, which is passed on
MAY_ASK_VENDORS = ("common/device/", "cli/machine.py", "common/compile/")


def mistakes_in(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    yield from _wall_clocks_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in CALLS:
                yield f"line {node.lineno}: {name} {CALLS[name]}"
            yield from _flags_of(node)
        elif isinstance(node, ast.Assert) and not _tells_mypy(node):
            yield f"line {node.lineno}: python -O skips an assert; raise an error"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (f"line {node.lineno}: {text} {why}" for text, why in TEXTS.items() if text in node.value)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` as a text; "" for what is no such name."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _wall_clocks_in(tree: ast.AST) -> Iterator[str]:
    """``int(time.time())`` is a date for someone to read; all else measures with a clock that people set."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    dates = [arg for call in calls if dotted(call.func) == "int" for arg in call.args]
    for call in calls:
        if dotted(call.func) in WALL_CLOCKS and call not in dates:
            yield f"line {call.lineno}: this clock jumps; time.monotonic does not"


def _flags_of(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        if keyword.arg in FLAGS and ast.unparse(keyword.value) != "False":
            yield f"line {call.lineno}: {keyword.arg} {FLAGS[keyword.arg]}"
        if keyword.arg == "verify" and ast.unparse(keyword.value) == "False":
            yield f"line {call.lineno}: trusts anyone"


def _tells_mypy(node: ast.Assert) -> bool:
    """What our own code guarantees and a type cannot say: that a value is there, or of which class it is."""
    test = ast.unparse(node.test)
    return test.endswith(" is not None") or test.startswith("isinstance(")


def vendor_questions_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in VENDOR_QUESTIONS:
            yield f"line {node.lineno}: {name}"  # type: ignore[attr-defined]
        elif isinstance(node, ast.Compare) and _names_vendor(node):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def _names_vendor(node: ast.Compare) -> bool:
    return any(isinstance(child, ast.Constant) and child.value in VENDORS for child in ast.walk(node))


def test_only_a_device_asks_which_gpu_it_is() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        text = path.read_text()
        may_ask = any(word in text for word in VENDORS | VENDOR_QUESTIONS)  # to parse all files takes seconds
        if may_ask and not name.startswith(MAY_ASK_VENDORS):
            assert list(vendor_questions_in(text)) == [], f"{name}: ask ops.active_traits()"


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.get_device_capability(device) >= (8, 9)",
        "if x.is_cuda: pass",
        "if device.type == 'cuda': pass",
        "if device.type in ('cuda', 'xpu'): pass",
    ],
)
def test_each_question_to_a_vendor_would_be_found(source: str) -> None:
    assert len(list(vendor_questions_in(source))) == 1


def test_nothing_does_what_is_forbidden() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        mistakes = [found for found in mistakes_in(path.read_text()) if not found.endswith(f": {ALLOWED.get(name)}")]
        assert mistakes == [], name


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=flag)",
        "from_pretrained(name, trust_remote_code=True)",
        "assert len(ids) < limit",
        "socket.bind('tcp://*:5555')",
        "np.load(path)",
        "httpx.get(url, verify=False)",
        "deadline = time.time() + 5",
        "raise OptionError(\"pip install 'lightserve[ray]'\")",
    ],
)
def test_each_of_them_would_be_found(source: str) -> None:
    assert len(list(mistakes_in(source))) == 1


@pytest.mark.parametrize(
    "source",
    ["assert x is not None", "subprocess.run(argv, shell=False)", "re.compile('a')", "created = int(time.time())"],
)
def test_what_is_harmless_is_not(source: str) -> None:
    assert list(mistakes_in(source)) == []
