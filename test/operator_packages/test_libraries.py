"""Libraries of operators, preferred to the kernels of the device."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lightserve.common import ops
from lightserve.common.device import base, ops_backends
from lightserve.conformance import main
from lightserve.errors import ServerError
from lightserve.offline.llm import LLM

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# the interpreter passes numbers that Liger's other kernels do not take
OPS = {"liger": ["relu2", "rms_norm", "silu_and_mul"] if HAS_GPU else ["relu2"], "gems": ["rms_norm", "silu_and_mul"]}
needs_liger = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="the Makefile installs it")
needs_gems = pytest.mark.skipif(
    find_spec("flag_gems") is None or not HAS_GPU, reason="needs a GPU, and pip install flag_gems"
)
LIBRARIES = [pytest.param("liger", marks=needs_liger), pytest.param("gems", marks=[needs_gems, pytest.mark.gpu])]


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As pip would have installed the adapters."""
    folder = __name__.rpartition(".")[0]
    found = [EntryPoint(name, f"{folder}.{name}", ops_backends.ENTRY_POINTS) for name in OPS]
    monkeypatch.setattr(ops_backends, "entry_points", lambda group: found)
    monkeypatch.setattr(base, "_bound", None)
    yield
    ops.use_backend(ops.REFERENCE)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_operators_of_a_library_pass_the_suite(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = OPS[library]

    assert main.main(["--device", DEVICE, "--only", "ops", "--ops", *names, "--ops_backend", library]) == 0

    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for name in names:
        assert any(row.startswith(f"ok {name} native {library}") for row in rows), rows


@needs_liger
def test_a_model_computes_with_the_operators_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import ArceeConfig, AutoModelForCausalLM

    from test.operator_packages import liger  # noqa: F401  it registers them

    for op in ops.OPS.values():
        if op.name not in OPS["liger"]:
            monkeypatch.delitem(op.impls, "liger", raising=False)
    torch.manual_seed(0)
    config = ArceeConfig(
        vocab_size=131,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    texts = []
    for names in ([], ["liger"]):
        with LLM(str(tmp_path), device=DEVICE, ops_backend=names, max_total_token_num=512) as llm:
            (generation,) = llm.generate([[1, 2, 3]], max_new_tokens=6, temperature=0, ignore_eos=True)
            texts.append(generation.token_ids)
            assert (ops.relu2.active_backend == "liger") == bool(names)

    assert texts[0] == texts[1]


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_backends, "entry_points", lambda group: [EntryPoint("gone", "no_library.kernels", group)])

    with pytest.raises(ServerError, match="--ops_backend gone: No module named 'no_library'"):
        main.main(["--device", DEVICE, "--only", "ops", "--ops", "relu2", "--ops_backend", "gone"])
