"""Keys of a cluster, and the command that makes them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lightserve.cli.main import main
from lightserve.errors import OptionError
from lightserve.links.keys import generate, read_engine_keys, read_gateway_keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generate(tmp_path)
    return tmp_path


def test_keygen_writes_keys_that_only_this_user_can_read_and_overwrites_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "keys"

    assert main(["cluster", "keygen", str(folder)]) == 0

    files = sorted(folder.iterdir())
    names = ["engine.secret", "engines.allowed", "gateway.secret", "gateways.allowed", "kv.secret", "node.secret"]
    assert [file.name for file in files if file.name != "kv.pem"] == names
    assert (folder / "kv.pem").exists() == (shutil.which("openssl") is not None)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    before = [file.read_bytes() for file in files]
    (folder / "engine.secret").unlink()
    assert main(["cluster", "keygen", str(folder)]) == 2
    assert "engines.allowed exists, and is not overwritten" in capsys.readouterr().err
    assert [file.read_bytes() for file in sorted(folder.iterdir())] == before[1:]


def test_a_folder_that_cannot_be_written_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()

    assert main(["cluster", "keygen", str(tmp_path / "file" / "keys")]) == 2

    assert "keys cannot be written" in capsys.readouterr().err


def test_a_line_of_engines_allowed_may_name_its_engine(folder: Path, tmp_path: Path) -> None:
    own = (folder / "engines.allowed").read_text()
    generate(tmp_path / "other")
    other = (tmp_path / "other" / "engines.allowed").read_text().strip()
    (folder / "engines.allowed").write_text(f"# ours\n\n{own}{other} tcp://a:1\n")

    keys = read_gateway_keys(str(folder))

    assert keys.key_of("tcp://b:1") == own.strip().encode()
    assert keys.key_of("tcp://a:1") == other.encode()


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("engine.secret", None, "cannot read"),
        ("engine.secret", "", "has 0 keys, and must have one"),
        ("engine.secret", "x\n", "not a key of 40 characters"),
        ("engine.secret", "\xe9" * 40, "cannot read"),
        ("engine.secret", "~" * 40, "not a key of 40 characters"),
        ("engine.secret", "#" * 40, "not a key of 40 characters"),
        ("gateways.allowed", "# nobody\n", "has no key: nobody could connect"),
    ],
)
def test_a_bad_file_is_refused_by_name(folder: Path, name: str, text: str | None, found: str) -> None:
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text, encoding="utf-8")

    with pytest.raises(OptionError, match=f"{name}.*{found}|{found}.*{name}"):
        read_engine_keys(str(folder))


def test_two_keys_for_one_engine_are_refused(folder: Path) -> None:
    path = folder / "engines.allowed"
    path.write_text(path.read_text() * 2)

    with pytest.raises(OptionError, match="two keys without an address"):
        read_gateway_keys(str(folder))


def test_a_secret_key_that_others_can_read_is_refused(folder: Path) -> None:
    (folder / "gateway.secret").chmod(0o644)

    with pytest.raises(OptionError, match="other users of this machine can read this secret key"):
        read_gateway_keys(str(folder))
