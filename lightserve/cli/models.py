"""``lightserve models``: which model types are supported, and which models are on this machine."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightserve.cli.cached_models import CachedModel, default_model_file, models_in
from lightserve.config.parse import Parser
from lightserve.model_files.hub.default_model import DEFAULT_MODEL
from lightserve.model_files.hub.settings import hub_cache
from lightserve.models.registry import supported_models
from lightserve.utils.progress import format_bytes
from lightserve.utils.terminal import Style, printable


def arguments() -> Parser:
    parser = Parser(prog="lightserve models", description="List supported models, and those on this machine.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse(argv)
    cached, default = models_in(hub_cache()), default_model_file()
    print(json.dumps(_as_json(cached, default), indent=2) if args.json else _as_text(cached, default))
    return 0


def _as_text(cached: Sequence[CachedModel], default: Path) -> str:
    style = Style(sys.stdout)
    types = sorted(supported_models(), key=str.lower)
    width = min(shutil.get_terminal_size().columns, 100)
    listed = textwrap.fill(" ".join(types), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    where = f"downloaded, {default}" if default.is_file() else "downloaded at the first start without a model"
    return "\n".join(
        [
            style.paint("bold", f"Supported: the {len(types)} values of model_type in config.json"),
            listed,
            style.paint("bold", f"In the Hugging Face cache, {hub_cache()}"),
            *([_row(model, style) for model in cached] or ["  nothing"]),
            style.paint("bold", "Default model"),
            f"  {DEFAULT_MODEL.name:{NAME_WIDTH}}  {format_bytes(DEFAULT_MODEL.file.size):>9}  {where}",
        ]
    )


NAME_WIDTH = 44


def _row(model: CachedModel, style: Style) -> str:
    kind = model.model_type or f"GGUF: {', '.join(model.ggufs[:3])}"
    remark = style.paint("yellow", model.remark) if model.remark else kind
    return printable(f"  {model.name:{NAME_WIDTH}}  {format_bytes(model.size):>9}") + f"  {remark}"


def _as_json(cached: Sequence[CachedModel], default: Path) -> dict[str, Any]:
    return {
        "model_types": sorted(supported_models()),
        "cache": str(hub_cache()),
        "cached": [
            {
                "name": model.name,
                "bytes": model.size,
                "model_type": model.model_type,
                "gguf_files": list(model.ggufs),
                "problem": model.remark or None,
            }
            for model in cached
        ],
        "default_model": {"name": DEFAULT_MODEL.name, "path": str(default), "is_downloaded": default.is_file()},
    }
