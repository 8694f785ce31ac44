"""Hooks of mkdocs: pages of the repository's root become pages of the site, and links to code become text.

On GitHub, pages link to ``../README.md`` and ``../lightserve/...``. The site has only pages.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {"README.md": "index.md", "SECURITY.md": "SECURITY.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
_LINK = re.compile(r"\[([^\]\n]*(?:\n[^\]\n]*)?)\]\((?!https?:|#)([^)\s#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, name in ROOT_PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = page.file.src_uri
    folder = ROOT if source in ROOT_PAGES.values() else (ROOT / "docs" / source).parent

    def rewritten(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = (folder / target).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return f"[{text}]({site_link(source, path.relative_to(ROOT / 'docs'))}{anchor})"
        if path.parent == ROOT and path.name in ROOT_PAGES:
            return f"[{text}]({site_link(source, Path(ROOT_PAGES[path.name]))}{anchor})"
        return text if path.exists() else match[0]  # mkdocs reports a link that leads nowhere

    return _LINK.sub(rewritten, markdown)


def site_link(source: str, target: Path) -> str:
    """The target as a page sees it; both are paths in the site."""
    return Path(os.path.relpath(target, Path(source).parent)).as_posix()
