"""``lightserve parity`` as people call it, on small models: its table, its verdict and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightserve.cli.main import main
from lightserve.common import ops
from test.models.transformers_backend.tiny_models import CASES, save_with_tokenizer
from test.small_text import save_small_model

TEXT = "abc 123 xyz true " * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _reference_backend_afterwards() -> object:
    yield
    ops.use_backend(ops.REFERENCE)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(["parity", "--device", "cpu", *argv])
    captured = capsys.readouterr()
    return code, captured.err + captured.out


def test_a_model_that_computes_the_same_has_exit_code_0(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "prompts").write_text("abc 12\n\nxyz true 0123\n")

    code, out = run(capsys, model, "--prompts", str(tmp_path / "prompts"), "--text", str(tmp_path / "text"))

    assert code == 0, out
    assert "LightServe in float32 on cpu, transformers in float32" in out
    assert out.count("the same\n") == 3  # two prompts and all
    assert "2 of 2 the same" in out
    assert "(+0.000%)" in out or "(-0.000%)" in out
    assert "verdict: the same (" in out


def test_a_model_that_computes_something_else_has_exit_code_1(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, out = run(capsys, model, "--model_type", "gemma", "--max_new_tokens", "6")  # the tensors of a Llama

    assert code == 1, out
    assert "verdict: they differ: a logit differs by " in out
    assert "greedy texts differ, and not by a tie" in out


def test_prompts_may_be_token_ids(capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path) -> None:
    long = [i * 7 % 40 for i in range(100)]  # more than one chunk with what follows
    (tmp_path / "prompts.json").write_text(json.dumps([[5], long, "abc"]))

    code, out = run(capsys, model, "--prompts", str(tmp_path / "prompts.json"), "--max_new_tokens", "1")

    assert code == 0, out
    assert " 1+1 " in out
    assert " 100+1 " in out


def test_quantised_weights_are_judged_by_their_distribution(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, out = run(capsys, model, "--quantization", "int8", "--max_new_tokens", "4")

    assert code == 0, out
    assert "KL" in out.splitlines()[-1]


def test_half_precision_is_compared_with_float32(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, out = run(capsys, model, "--dtype", "float16", "--max_new_tokens", "4")

    assert code == 0, out
    assert "LightServe in float16 on cpu" in out


def test_a_model_that_transformers_runs_is_compared_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_with_tokenizer(CASES["mimo_v2_flash"], tmp_path)

    code, out = run(capsys, str(tmp_path), "--model_impl", "transformers", "--max_new_tokens", "4")

    assert code == 0, out
    assert "by the modules of transformers" in out


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ("[1, 2]", [], "wanted lines, or a JSON list of texts or of lists of token ids"),
        ("[", [], "not readable as JSON"),
        ("", [], "wanted lines"),
        ("[[]]", [], "wanted lines, or a JSON list of texts or of lists of token ids"),
        ("a", ["--max_new_tokens", "0"], "max_new_tokens=0: must be at least 1"),
        ("a", ["--load_format", "dummy"], "--load_format: parity compares the weights of a text model on one device"),
        ("a", ["--text", "/no/such/file"], "cannot be read"),
        ("a", ["--model_dir", "another"], "two models: "),
    ],
)
def test_bad_input_has_exit_code_2_and_one_line(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path, content: str, flags: list[str], message: str
) -> None:
    (tmp_path / "prompts").write_text(content)

    code, out = run(capsys, model, "--prompts", str(tmp_path / "prompts"), *flags)

    assert code == 2
    assert message in out.splitlines()[-1]
