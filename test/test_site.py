"""The documentation builds as a website, and a link that leads nowhere stops the build."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("mkdocs.yml", "README.md", "SECURITY.md", "CONTRIBUTING.md", "LICENSE")


def build(root: Path, site: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_the_site_has_every_page_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    code, output = build(ROOT, tmp_path)

    assert code == 0, output
    built = {path.parent.relative_to(tmp_path) for path in tmp_path.rglob("index.html")}
    pages = {page.relative_to(ROOT / "docs").with_suffix("") for page in (ROOT / "docs").rglob("*.md")}
    assert pages | {Path("SECURITY"), Path("CONTRIBUTING")} <= built
    start = (tmp_path / "index.html").read_text()
    assert 'href="api/"' in start
    assert 'src="images/chat.png"' in start
    assert not re.search(r'<(?:script|img|link)[^>]*(?:src|href)="(?:https?:)?//', start)


MISTAKES = [
    ("docs/web.md", "[gone](absent.md)"),
    ("docs/web.md", "[gone](api.md#no-such-heading)"),
    ("docs/web.md", "[gone](../lightserve/absent.py)"),
    ("docs/log/gpu.md", "[gone](../absent.md)"),
    ("README.md", "[gone](docs/absent.md)"),
    ("docs/new_page.md", "# A page that is not in the navigation"),
]


def test_each_mistake_stops_the_build(tmp_path: Path) -> None:
    for name in SOURCES:
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("lightserve", "benchmark", "test"):  # pages link to them
        (tmp_path / name).symlink_to(ROOT / name)
    for page, line in MISTAKES:
        with (tmp_path / page).open("a") as file:
            file.write(f"\n{line}\n")

    code, output = build(tmp_path, tmp_path / "site")

    assert code == 1
    assert f"Aborted with {len(MISTAKES)} warnings in strict mode!" in output
