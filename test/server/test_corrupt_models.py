"""Any error in a model's files is reported in one line that names the file and the remedy, with exit code 2.

The launcher finds what it can before it opens a port. What needs torch, the worker finds before it reads weights.
Nobody searches weights for NaN.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.config.parse import parse_server
from lightserve.errors import CheckpointError, ServerError
from lightserve.model_files import resolve
from lightserve.server import api_server
from lightserve.server.checks import check
from lightserve.worker import worker as worker_module
from lightserve.worker.worker import ModelWorker
from test.api.server import running_server
from test.model_files.files import save_as_gguf, tiny_model as tiny_gguf_model
from test.small_text import save_small_model

Damage = Callable[[Path], object]
WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model. Every test damages a copy of it."""
    return Path(save_small_model(tmp_path_factory.mktemp("whole")))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def refusal(capsys: pytest.CaptureFixture[str], model_dir: Path | str, *flags: str) -> str:
    """The one line that the launcher prints when it refuses to start, before it opens a port."""
    code = api_server.main(["--port=0", f"--model_dir={model_dir}", *flags])
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len(line) < 1000
    return line.removeprefix("lightserve: ")


def write(name: str, content: str | bytes) -> Damage:
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(raw)


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def as_folder(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return damage


def setting(name: str, **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | changes))

    return damage


def cut(name: str, keep: int) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def header(**changes: Any) -> Damage:
    """Change the description of one tensor in the weights' header."""

    def damage(folder: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        entries = json.loads(raw[8 : 8 + length])
        entries[NORM] |= changes
        text = json.dumps(entries).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return damage


def index(**weight_map: Any) -> Damage:
    return write("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


INVALID_ENTRY = "its header has an invalid entry for tensor model.norm.weight"
FOLDERS: dict[str, tuple[Damage, str, str]] = {
    # the damage, the file that the error must name, a part of its text
    "no config": (without("config.json"), "", "no config.json and no .gguf file in it; set --model_dir"),
    "config is a folder": (as_folder("config.json"), "", "no config.json and no .gguf file"),
    "config is empty": (write("config.json", ""), "config.json", "not readable as JSON"),
    "config is cut short": (cut("config.json", 50), "config.json", "not readable as JSON"),
    "config is no text": (write("config.json", b"\xff\xfe\0"), "config.json", "not readable as JSON"),
    "config is a list": (write("config.json", "[]"), "config.json", "a JSON list instead of an object"),
    "config is deep": (write("config.json", '{"a":' * 100_000), "config.json", "not readable as JSON"),
    "no model type": (setting("config.json", model_type=None), "", "model_type 'None' is not supported; "),
    "another model": (setting("config.json", model_type="mamba"), "", "model_type 'mamba' is not supported; "),
    "layers are text": (setting("config.json", num_hidden_layers="2"), "config.json", "is '2', wanted a positive int"),
    "too many layers": (setting("config.json", num_hidden_layers=10**9), "config.json", "of at most 10000; correct"),
    "no heads": (setting("config.json", num_attention_heads=0), "config.json", "num_attention_heads is 0, wanted"),
    "heads are true": (setting("config.json", num_attention_heads=True), "config.json", "is True, wanted a positive"),
    "negative KV heads": (setting("config.json", num_key_value_heads=-2), "config.json", "num_key_value_heads is -2"),
    "head_dim is text": (setting("config.json", head_dim="16"), "config.json", "head_dim is '16', wanted"),
    "heads that do not divide": (
        setting("config.json", head_dim=None, hidden_size=65),
        "config.json",
        "size 65",
    ),
    "absurd vocabulary": (setting("config.json", vocab_size=10**12), "config.json", "vocab_size is 1000000000000, wan"),
    "absurd context": (setting("config.json", max_position_embeddings=1e30), "config.json", "max_position_embeddings"),
    "no epsilon": (setting("config.json", rms_norm_eps=None), "config.json", "has no rms_norm_eps"),
    "NaN epsilon": (setting("config.json", rms_norm_eps=float("nan")), "config.json", "is nan, wanted a positive num"),
    "rope of text": (setting("config.json", rope_parameters={"rope_theta": "x"}), "config.json", "rope_theta is 'x'"),
    "rope of one": (setting("config.json", rope_parameters={"rope_theta": 1}), "config.json", "are inconsistent"),
    "rope is a list": (setting("config.json", rope_parameters=[1]), "config.json", "rope_parameters is [1], wanted"),
    "tied perhaps": (setting("config.json", tie_word_embeddings="no"), "config.json", "wanted true or false"),
    "end token is text": (setting("config.json", eos_token_id="end"), "config.json", "eos_token_id is 'end', not an"),
    "generation config": (write("generation_config.json", "{"), "generation_config.json", "not readable as JSON"),
    "sampling default": (setting("generation_config.json", top_p=7), "", "generation_config.json: top_p: Expected"),
    "second template": (
        setting("tokenizer_config.json", chat_template=[{"name": "a"}]),
        "tokenizer_config",
        "not a str",
    ),
    "no tokenizer": (without("tokenizer.json"), "", "no tokenizer.json and none of tekken.json"),
    "tokenizer is empty": (write("tokenizer.json", ""), "tokenizer.json", "not readable as a tokenizer"),
    "tokenizer is cut short": (cut("tokenizer.json", 100), "tokenizer.json", "not readable as a tokenizer"),
    "tokenizer is a list": (write("tokenizer.json", "[]"), "tokenizer.json", "not readable as a tokenizer"),
    "tokenizer is a folder": (as_folder("tokenizer.json"), "", "no tokenizer.json"),
    "tokenizer config": (write("tokenizer_config.json", "{"), "tokenizer_config.json", "not readable as JSON"),
    "tokens of no kind": (setting("tokenizer_config.json", eos_token={"a": 1}), "", "its tokenizer is damaged"),
    "added tokens": (setting("tokenizer_config.json", added_tokens_decoder=[1]), "", "its tokenizer is damaged"),
    "template": (write("chat_template.jinja", "{% if %}"), "", "the chat template is not valid Jinja"),
    "template is no text": (write("chat_template.jinja", b"\xff"), "chat_template.jinja", "not readable as text"),
    "template is a number": (setting("tokenizer_config.json", chat_template=5), "tokenizer_config.json", "not a str"),
    "no weights": (without(WEIGHTS), "", "no weights (model*.safetensors or pytorch_model*.bin); download them again"),
    "weights are a folder": (as_folder(WEIGHTS), "", "no weights"),
    "weights are empty": (cut(WEIGHTS, 0), WEIGHTS, "truncated or damaged"),
    "weights are cut short": (cut(WEIGHTS, -1), WEIGHTS, "truncated or damaged"),
    "weights end in the header": (cut(WEIGHTS, 100), WEIGHTS, "truncated or damaged"),
    "header beyond the file": (write(WEIGHTS, b"\xff" * 64), WEIGHTS, "its header needs 18446744073709551615 bytes"),
    "header of garbage": (write(WEIGHTS, struct.pack("<Q", 4) + b"\xff\xfe{["), WEIGHTS, "its header is not JSON"),
    "header is a list": (write(WEIGHTS, struct.pack("<Q", 2) + b"[]"), WEIGHTS, "its header is not a JSON object"),
    "header of text": (header(data_offsets="ab"), WEIGHTS, INVALID_ENTRY),
    "offsets backwards": (header(data_offsets=[8, 4]), WEIGHTS, INVALID_ENTRY),
    "shape below zero": (header(shape=[-1]), WEIGHTS, INVALID_ENTRY),
    "shape beyond the bytes": (header(shape=[10**12]), WEIGHTS, INVALID_ENTRY),
    "index is broken": (write("model.safetensors.index.json", "{"), "model.safetensors.index.json", "not readable"),
    "index of nothing": (index(), "model.safetensors.index.json", "names no shard files"),
    "index of numbers": (index(a=5), "model.safetensors.index.json", "names no shard files"),
    "index of odd names": (index(a="\0"), "model.safetensors.index.json", "names no shard files"),
    "index and no shard": (
        index(a="b.safetensors"),
        "model.safetensors.index.json",
        "names b.safetensors",
    ),
    "index of elsewhere": (index(a="/etc/passwd"), "model.safetensors.index.json", "is outside the folder"),
    "index and no tensor": (
        index(a=WEIGHTS),
        "model.safetensors.index.json",
        "lacks 1 tensors",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_damaged_folder_is_refused_before_a_port_is_opened(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, file, reason = FOLDERS[name]
    damage(folder)

    line = refusal(capsys, folder)

    assert str(folder / file) in line or f"{folder}: {file}" in line or "model_type" in line
    assert reason in line


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--tp=3"], "do not divide among tp=3 ranks; choose a tp"),
        (["--max_model_len=129"], "max_req_total_len=129, but the model supports 128 tokens; lower it"),
        (
            ["--max_total_token_num=1"],
            "max_total_token_num=1 is less than one request of 2 tokens; raise --max_total_token_num",
        ),
        (
            ["--max_total_token_num=50", "--max_model_len=100"],
            "less than one request of 100 tokens; raise --max_total_token_num",
        ),
    ],
)
def test_a_flag_that_the_model_does_not_allow_is_reported(
    whole: Path, capsys: pytest.CaptureFixture[str], flags: list[str], reason: str
) -> None:
    assert reason in refusal(capsys, whole, *flags)


def gguf_bytes(folder: Path) -> bytes:
    return save_as_gguf(tiny_gguf_model("llama"), folder / "whole.gguf").read_bytes()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda raw: b"", "cannot be read as GGUF"),
        (lambda raw: b"PK\x03\x04" + raw[4:], "not a GGUF file (it starts with b'PK"),
        (lambda raw: raw[:4] + b"\x09" + raw[5:], "GGUF version 9 is not supported"),
        (lambda raw: raw[:200], "truncated or damaged; download it again"),
        (lambda raw: raw[:-1], "truncated or damaged; download it again"),
        (lambda raw: raw.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"), "'mamba' is not supported"),
    ],
)
def test_a_damaged_gguf_is_refused(
    damage: Callable[[bytes], bytes], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(gguf_bytes(tmp_path)))

    line = refusal(capsys, path)

    assert line.startswith(f"{path}: ")
    assert reason in line


def test_a_path_without_a_model_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")

    assert "no such folder or .gguf file" in refusal(capsys, tmp_path / "missing")
    assert "no such folder or .gguf file" in refusal(capsys, tmp_path / "loop")
    assert "cannot be opened" in refusal(capsys, "/" + "x" * 5000)
    assert "cannot be opened" in refusal(capsys, "~nobody-has-this-name/model")


def test_a_damaged_file_cannot_write_on_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setting("config.json", model_type="\x1b[2J\nlightserve: all is well")(folder)

    assert "\x1b" not in refusal(capsys, folder)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({}, ""),
        ({"vocab_size": 40}, "tokens, the model's embedding only 40; prompts with the other tokens are refused"),
        (
            {"eos_token_id": None},
            "defines no end token: every response runs to its length limit; set one with --eos_id",
        ),
        ({"eos_token_id": -1}, "defines no end token"),
    ],
)
def test_a_tolerable_problem_logs_a_warning(
    folder: Path, log: pytest.LogCaptureFixture, changes: dict[str, Any], warning: str
) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    setting("config.json", **changes)(folder)
    setting("tokenizer_config.json", eos_token=None)(folder)

    check(parse_server(["--port=0", "--load_format=dummy", f"--model_dir={folder}"]))

    assert warning in log.text if warning else not log.text


def test_code_that_comes_with_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    setting("config.json", auto_map={"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "modeling.Config"})(folder)
    setting("tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling.Tokenizer", None]})(folder)

    check(parse_server(["--port=0", f"--model_dir={folder}"]))
    ModelWorker(WorkerConfig(device="cpu", max_total_token_num=64), resolve(str(folder)), Parallel())

    assert not (tmp_path / "owned").exists()


# what only the worker can check


class MustNotRun:
    """Unpickling it would make a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.fixture
def no_weights_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Iterator[Any]:
        yield from ()
        raise AssertionError("weights are read")

    monkeypatch.setattr(worker_module, "with_progress", fail)


def load(folder: Path) -> str:
    """The worker's error."""
    with pytest.raises(CheckpointError) as refused:
        ModelWorker(WorkerConfig(device="cpu", max_total_token_num=64), resolve(str(folder)), Parallel())
    return str(refused.value)


@pytest.mark.usefixtures("no_weights_read")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop(NORM), rf"lacks 1 tensors: {NORM}; fetch"),
        (
            lambda tensors: tensors.update({NORM: torch.ones(63)}),
            f"{NORM} has shape (63,), but config.json needs (64,); f",
        ),
        (lambda tensors: tensors.update({NORM: torch.ones(64).to(torch.int8)}), f"{NORM} is int8; only float"),
        (lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.complex64)}), f"{NORM} is C64; only float"),
    ],
)
def test_wrong_tensors_are_reported_before_any_is_read(
    change: Callable[[dict[str, Any]], Any], reason: str, folder: Path
) -> None:
    change_tensors(folder, change)

    message = load(folder)

    assert reason in message
    assert "lacks" in message or message.startswith(f"{folder / WEIGHTS}: ")


@pytest.mark.usefixtures("no_weights_read")
def test_a_config_with_fewer_layers_than_the_checkpoint_is_refused_before_weights_are_read(folder: Path) -> None:
    setting("config.json", num_hidden_layers=1)(folder)

    reason = load(folder)

    assert "the checkpoint has layers 0 to 1, but config.json says 1" in reason
    assert f"({folder / WEIGHTS})" in reason


@pytest.mark.usefixtures("no_weights_read")
def test_an_embedding_of_another_size_is_reported_without_allocating_it(folder: Path) -> None:
    setting("config.json", vocab_size=2**24, hidden_size=2**24)(folder)

    assert "needs (16777216, 16777216)" in load(folder)


@pytest.mark.usefixtures("no_weights_read")
def test_loading_a_bin_file_runs_no_code(folder: Path, tmp_path: Path) -> None:
    tensors: dict[str, Any] = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(tensors | {NORM: MustNotRun(tmp_path / "owned")}, folder / "pytorch_model.bin")

    assert "not loadable with weights_only" in load(folder)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("changes", "running_max_req_size"),
    [({"vocab_size": 2**24, "hidden_size": 2**24}, 1), ({}, 2**45)],
    ids=["weights", "requests"],
)
def test_a_model_that_does_not_fit_into_memory_is_reported(
    folder: Path, changes: dict[str, int], running_max_req_size: int
) -> None:
    """Each case needs more memory than a process can address."""
    setting("config.json", **changes)(folder)
    config = WorkerConfig(device="cpu", load_format="dummy", running_max_req_size=running_max_req_size)

    with pytest.raises(ServerError, match=r"not enough memory .*; use a smaller model, more ranks"):
        ModelWorker(config, resolve(str(folder)), Parallel())


# the whole server


def start(model_dir: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightserve.server.api_server", "--port=0", f"--model_dir={model_dir}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | env)


def test_an_error_of_the_worker_is_one_line_too(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(NORM))

    run = start(folder, "--device=cpu")

    assert run.returncode == 2, run.stderr
    assert run.stderr.splitlines()[-1].startswith(f"lightserve: the checkpoint lacks 1 tensors: {NORM}; fetch")
    assert "Traceback" not in run.stderr


@pytest.mark.long
def test_the_server_runs_with_an_unusual_path_and_a_read_only_home(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole, tmp_path / "Modell mit 🦙 und ümlaut")
    (tmp_path / "link").symlink_to("Modell mit 🦙 und ümlaut")
    for name in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "/dev/null/nowhere")

    with running_server(tmp_path / "log", "--device=cpu", "--model_dir", str(tmp_path / "link")) as server:
        status, response = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 2})

    assert status == 200, response
    assert response["model"] == "Modell mit 🦙 und ümlaut"
    assert "kernels are compiled at every start" in server.log


@pytest.mark.long
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_start_with_a_damaged_file_ends_with_code_2(folder: Path, suffix: str) -> None:
    damaged = next(folder.glob(f"*{suffix}"))
    damaged.write_bytes(damaged.read_bytes()[:20])

    run = start(folder)

    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1
    assert damaged.name in run.stderr
