"""Models by name, against a local server with the hub's protocol."""

from __future__ import annotations

import shutil
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightserve.config.parse import parse_server
from lightserve.errors import ModelFilesError
from lightserve.model_files import ModelSource, resolve
from lightserve.model_files.hub import HubName, parse_hub_name, transfer
from lightserve.server.checks import check, with_local_files
from lightserve.utils.progress import Progress
from test.model_files.files import save_as_gguf, tiny_model
from test.model_files.hub_server import COMMIT, REPO, HubServer, Refusal, digest_of, serving

NOT_NEEDED = [
    "README.md",
    "original/old.tiktoken",
    "pytorch_model.bin",
    "model.gguf",
    "modeling.py",
    "onnx/config.json",
]
CHUNK = 1000  # bytes that huggingface_hub writes at a time


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder, max_shard_size="100KB")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("documents")
    return contents_of(folder)


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def server(tiny_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with serving(dict(tiny_files)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def shards_of(files: dict[str, bytes]) -> list[str]:
    return sorted(name for name in files if name.endswith(".safetensors"))


def model_with_one_weight_file(server: HubServer) -> ModelSource:
    """With its settings downloaded."""
    shards = shards_of(server.files)
    server.files["model.safetensors"] = server.files[shards[0]]
    for name in (*shards, "model.safetensors.index.json"):
        del server.files[name]
    return resolve(REPO, needs_weights=False)


def partial_of(name: str, server: HubServer, cache: Path) -> Path:
    return cache / "models--org--tiny" / "blobs" / f"{digest_of(name, server.files[name])}.incomplete"


def refusal(name: str = REPO) -> str:
    with pytest.raises(ModelFilesError) as caught:
        resolve(name)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{name}: ")
    return text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-8B", HubName("Qwen/Qwen3-8B")),
        ("gpt2", HubName("gpt2")),
        ("org/model@v1.0", HubName("org/model", "v1.0")),
        ("org/model@refs/pr/1", HubName("org/model", "refs/pr/1")),
        ("org/model:Q4/m-Q4_K_M.gguf", HubName("org/model", "main", "Q4/m-Q4_K_M.gguf")),
        ("org/model@v1:m.gguf", HubName("org/model", "v1", "m.gguf")),
        ("a/b/c", None),
        ("./model", None),
        ("/org/model", None),
        ("../model", None),
        ("org/model.gguf", None),
        ("org/model@../main", None),
        ("org/model:/etc/m.gguf", None),
        ("org/model:Q4_K_M", None),
        ("org/mo--del", None),
        ("", None),
    ],
)
def test_a_name_is_a_repository_with_a_revision_or_a_file(text: str, expected: HubName | None) -> None:
    assert parse_hub_name(text) == expected
    if expected is not None:
        assert str(expected) == text


def test_only_the_needed_files_are_downloaded_with_one_progress_line(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = set(server.files)
    server.files |= dict.fromkeys(NOT_NEEDED, b"of another tool")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    source = resolve(f"{REPO}@v1")

    assert (source.name, source.path) == (REPO, tmp_path / "hub/models--org--tiny/snapshots" / COMMIT)
    assert contents_of(source.path) == {name: server.files[name] for name in needed}
    assert [path.name for path in source.weight_files()] == shards_of(server.files)
    assert server.asked[0].path == f"/api/models/{REPO}/revision/v1"
    tokens = {one.token for one in server.asked if one.path.startswith("/large")}
    assert tokens == {None}, "the token must not go to another host"
    assert {one.token for one in server.asked if not one.path.startswith("/large")} == {"Bearer hf_secret"}
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("downloading")]
    assert line.startswith(f"downloading {REPO}@v1: 100 %")


def test_the_second_start_downloads_nothing_and_other_tools_find_the_files(server: HubServer, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    resolve(REPO)
    server.asked.clear()

    path = resolve(REPO).path

    assert [one.path for one in server.asked] == [f"/api/models/{REPO}/revision/main"]
    assert snapshot_download(REPO, cache_dir=tmp_path / "hub", local_files_only=True) == str(path)


def test_a_new_commit_downloads_only_what_has_changed(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(REPO)
    server.files["generation_config.json"] = b'{"eos_token_id": 7}'
    server.commit = "f" * 40
    server.asked.clear()

    source = resolve(REPO)

    assert server.downloads() == ["generation_config.json"]
    assert contents_of(source.path) == server.files
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve(REPO).path.name == server.commit


def test_two_starts_at_once_download_each_file_once(server: HubServer) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(resolve, [REPO, REPO])

    assert first.path == second.path
    assert sorted(server.downloads()) == sorted(server.files)


def test_without_weights_only_the_settings_are_downloaded(server: HubServer) -> None:
    resolve(REPO, needs_weights=False)

    assert not {name for name in server.downloads() if name.endswith((".safetensors", ".bin"))}


def test_python_code_is_downloaded_only_if_it_is_trusted(server: HubServer) -> None:
    server.files["tokenization_own.py"] = b"print()"

    source = resolve(REPO, needs_weights=False, trusts_code=True)

    assert (source.path / "tokenization_own.py").read_bytes() == b"print()"


def test_a_download_continues_after_a_broken_connection(server: HubServer) -> None:
    source = model_with_one_weight_file(server)
    server.cuts = [3 * CHUNK + 10, 2 * CHUNK, 0]

    source.fetch_weights()

    [path] = source.weight_files()
    assert path.read_bytes() == server.files[path.name]
    ranges = [one.range for one in server.asked if one.path.startswith("/large")]
    assert ranges == [None, "bytes=3000-", "bytes=5000-", "bytes=5000-"]


def test_a_download_resumes_where_an_earlier_run_was_interrupted(server: HubServer, tmp_path: Path) -> None:
    name = shards_of(server.files)[0]
    server.refusals[server.large_path(name)] = Refusal(503)
    assert "answered 503; try again later" in refusal()
    partial_of(name, server, tmp_path / "hub").write_bytes(server.files[name][: 5 * CHUNK])
    server.refusals.clear()
    server.asked.clear()

    files = resolve(REPO).weight_files()

    assert files[0].read_bytes() == server.files[name]
    assert [one.range for one in server.asked if one.path.startswith(server.large_path(name))] == ["bytes=5000-"]
    assert not list((tmp_path / "hub").rglob("*.incomplete"))


def test_ctrl_c_stops_the_download_and_keeps_what_has_arrived(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model_with_one_weight_file(server)
    has_begun, is_stopped = threading.Event(), threading.Event()

    def advance(progress: Progress, n_bytes: int) -> None:
        has_begun.set()
        is_stopped.wait()

    def wait(*_: object, **__: object) -> None:
        has_begun.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "advance", advance)
    monkeypatch.setattr(transfer, "wait", wait)
    monkeypatch.setattr(transfer, "_stop_xet", is_stopped.set)

    with pytest.raises(KeyboardInterrupt):
        source.fetch_weights()

    assert partial_of("model.safetensors", server, tmp_path / "hub").stat().st_size == CHUNK


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"?", lambda data: data[:-1]], ids=["hash", "size"])
@pytest.mark.parametrize("name", ["config.json", "shard"])
def test_a_file_with_wrong_content_is_deleted(server: HubServer, tmp_path: Path, change: Any, name: str) -> None:
    name = shards_of(server.files)[0] if name == "shard" else name
    server.sent[name] = change(server.files[name])

    text = refusal()

    assert f"{name} arrived with" in text
    assert "it was deleted: start again" in text
    assert not partial_of(name, server, tmp_path / "hub").exists()
    server.sent.clear()
    resolve(REPO)


@pytest.mark.parametrize("is_link", [True, False])  # some file systems have no links
def test_a_truncated_file_in_the_cache_is_downloaded_again(server: HubServer, is_link: bool) -> None:
    [first, *_] = resolve(REPO).weight_files()
    if not is_link:
        first.unlink()
    first.write_bytes(b"too short")

    resolve(REPO)

    assert first.read_bytes() == server.files[first.name]


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (Refusal(401), "has no such model (401); check the name; for a private model set HF_TOKEN"),
        (Refusal(404, {"X-Error-Code": "RepoNotFound"}), "has no such model (404)"),
        (Refusal(404), "has no such model (404)"),
        (Refusal(404, {"X-Error-Code": "RevisionNotFound"}), "it has no revision 'main' (404)"),
        (Refusal(403, {"X-Error-Code": "GatedRepo"}), "accept the conditions on"),
        (Refusal(403), "refuses the token (403)"),
        (Refusal(429), "limits the rate of requests (429)"),
        (Refusal(500), "answered 500; try again later"),
        (Refusal(200), "an answer that is not the hub's"),
    ],
    ids=lambda value: str(value.status) if isinstance(value, Refusal) else "",
)
def test_a_refusal_is_one_line_with_the_remedy(server: HubServer, refused: Refusal, words: str) -> None:
    server.refusals["/api/"] = refused

    assert words in refusal()


def test_a_token_that_is_not_valid_is_named(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    server.refusals["/api/"] = Refusal(401, {"X-Error-Message": "Invalid credentials in Authorization header"})

    assert "refuses the token (401); set HF_TOKEN to a valid one" in refusal()


def test_a_gated_file_of_a_public_listing_is_named(server: HubServer) -> None:
    server.refusals["/resolve/"] = Refusal(403, {"X-Error-Code": "GatedRepo"})

    assert "accept the conditions on" in refusal()


def test_without_a_network_the_remedy_is_a_copy(monkeypatch: pytest.MonkeyPatch, server: HubServer) -> None:
    with serving({}) as closed:
        monkeypatch.setenv("HF_ENDPOINT", closed.endpoint)

    text = refusal()

    assert f"{closed.endpoint} cannot be reached" in text
    assert f"`hf download {REPO}`" in text


def test_without_a_network_the_traceback_is_that_of_the_caller(
    monkeypatch: pytest.MonkeyPatch, server: HubServer
) -> None:
    with serving({}) as closed:
        monkeypatch.setenv("HF_ENDPOINT", closed.endpoint)

    with pytest.raises(ModelFilesError) as refused:
        resolve("missing_folder")

    lines = "".join(traceback.format_exception(refused.value)).splitlines()
    assert "no folder" in lines[-1]
    assert "cannot be reached (" in lines[-1]
    assert [line for line in lines if "site-packages" in line] == []


def test_without_a_network_a_copy_in_the_cache_is_used(monkeypatch: pytest.MonkeyPatch, server: HubServer) -> None:
    path = resolve(REPO).path
    server.refusals["/api/"] = Refusal(502)

    assert resolve(REPO).path == path

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    server.asked.clear()
    assert resolve(REPO).path == path
    assert resolve(f"{REPO}@{COMMIT}").path == path
    assert server.asked == []


def test_offline_a_model_that_is_not_complete_is_refused(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set, and" in refusal()

    monkeypatch.delenv("HF_HUB_OFFLINE")
    resolve(REPO, needs_weights=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "the copy in the cache is not complete" in refusal()


def test_disk_space_is_checked_before_a_download(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(REPO, needs_weights=False)
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    server.asked.clear()

    text = refusal()

    assert "has only 1.0 kB free; free some, or set HF_HOME" in text
    assert server.downloads() == []


def test_a_mirror_without_the_hubs_headers_is_named(server: HubServer) -> None:
    server.is_hub = False

    assert f"{server.endpoint} gave an answer that is not the hub's (Response from" in refusal()


def test_a_cache_that_cannot_be_written_is_reported(server: HubServer, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file where the folder should be")

    assert "cannot be written" in refusal()


def test_a_local_folder_wins_over_a_name(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model("llama").save_pretrained(tmp_path / REPO)

    assert resolve(REPO).name == "tiny"
    assert server.asked == []


def test_a_gguf_file_is_downloaded_by_its_name(server: HubServer, tmp_path: Path) -> None:
    data = save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf").read_bytes()
    server.files = {"a-Q4.gguf": data, "sub/b-Q8.gguf": data, "mmproj.gguf": b"", "README.md": b""}

    source = resolve(f"{REPO}:sub/b-Q8.gguf")

    assert source.name == f"{REPO}:sub/b-Q8.gguf"
    assert source.path.read_bytes() == data
    assert server.downloads() == ["sub/b-Q8.gguf"]
    assert f"name one, such as {REPO}:a-Q4.gguf; it has a-Q4.gguf (" in refusal()
    assert "has no file c.gguf; it has a-Q4.gguf, mmproj.gguf, sub/b-Q8.gguf" in refusal(f"{REPO}:c.gguf")


def test_the_only_gguf_file_of_a_repository_needs_no_name(server: HubServer, tmp_path: Path) -> None:
    data = save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf").read_bytes()
    server.files = {"a-Q4.gguf": data, "config.json": b"{}"}

    assert resolve(REPO).name == REPO


@pytest.mark.parametrize("text", [REPO, f"{REPO}:Q4/m-00001-of-00003.gguf"])
def test_all_files_of_a_split_gguf_are_downloaded(server: HubServer, tmp_path: Path, text: str) -> None:
    save_as_gguf(tiny_model("llama"), tmp_path / "m.gguf", split_max_tensors=8)
    server.files = {f"Q4/{path.name}": path.read_bytes() for path in sorted(tmp_path.glob("m-*.gguf"))}

    source = resolve(text)

    assert [path.name for path in source.weight_files()] == [Path(name).name for name in server.files]
    assert sorted(server.downloads()) == sorted(server.files)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["m-00001-of-00002.gguf"], "has no file m-00002-of-00002.gguf; it has m-00001-of-00002.gguf"),
        (["adapter_config.json"], "no config.json and no .gguf file; it has adapter_config.json"),
        (["config.json", "original/consolidated.00.pth"], "has no weights"),
    ],
)
def test_a_repository_that_cannot_be_served_is_refused(server: HubServer, files: list[str], words: str) -> None:
    config = server.files["config.json"]
    server.files = dict.fromkeys(files, config)

    assert words in refusal()


def test_a_file_in_xet_is_downloaded_over_http_without_hf_xet(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import file_download

    server.has_xet = True
    monkeypatch.setitem(sys.modules, "hf_xet", None)
    monkeypatch.setattr(file_download, "is_xet_available", lambda: False)

    files = resolve(REPO).weight_files()

    assert [path.read_bytes() for path in files] == [server.files[path.name] for path in files]


@pytest.mark.parametrize("is_right", [True, False])
def test_a_file_in_xet_is_downloaded_by_hf_xet_and_checked(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_right: bool
) -> None:
    from huggingface_hub import file_download

    server.has_xet = True

    def xet_get(*, incomplete_path: Path, xet_file_data: Any, expected_size: int, tqdm_class: Any, **_: Any) -> None:
        [data] = [data for name, data in server.files.items() if digest_of(name, data) == xet_file_data.file_hash]
        incomplete_path.write_bytes(data if is_right else bytes(len(data)))
        tqdm_class(total=expected_size).update(expected_size)

    monkeypatch.setattr(file_download, "xet_get", xet_get)
    if not is_right:
        assert "it was deleted" in refusal()
        assert not [path for path in tmp_path.rglob("*.safetensors") if path.is_symlink() and not path.exists()]
        return

    files = resolve(REPO).weight_files()

    assert [path.stat().st_size for path in files] == [len(server.files[path.name]) for path in files]
    assert not {name for name in server.downloads() if name.endswith(".safetensors")}


def test_if_hf_xet_fails_the_file_is_downloaded_over_http(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    def xet_get(**_: Any) -> None:
        raise RuntimeError("Network error: connection refused")

    server.has_xet = True
    monkeypatch.setattr(file_download, "xet_get", xet_get)

    files = resolve(REPO).weight_files()

    assert [path.read_bytes() for path in files] == [server.files[path.name] for path in files]


def test_a_model_that_is_not_supported_is_refused_before_its_weights_are_downloaded(server: HubServer) -> None:
    server.files["config.json"] = b'{"model_type": "mamba", "vocab_size": 8}'

    with pytest.raises(ModelFilesError, match="mamba"):
        check(parse_server(["--port=0", f"--model_dir={REPO}"]))

    assert not {name for name in server.downloads() if name.endswith(".safetensors")}


def test_other_processes_use_the_downloaded_folder_under_the_same_name(server: HubServer) -> None:
    config = parse_server(["--port=0", f"--model_dir={REPO}@v1"])

    model = check(config)
    local = with_local_files(config, model)

    assert (model.name, local.http.model_name) == (REPO, [REPO])
    assert local.worker.model_dir == str(model.path)
    assert Path(str(local.worker.model_dir)).name == COMMIT
