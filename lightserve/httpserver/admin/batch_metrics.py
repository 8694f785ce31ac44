"""Metrics of files and batches. They come from the store: the same in every HTTP process and after a restart."""

from __future__ import annotations

from collections.abc import Mapping

from lightserve.batches.records import Totals
from lightserve.httpserver.admin.metrics_page import label

PREFIX = "lightserve_"
BATCHES = "batches"
REQUESTS = "batch_requests_total"
PENDING = "batch_requests_pending"
BYTES = "batch_files_bytes"


def batch_metrics(model_name: str, totals: Totals) -> bytes:
    model = label("model_name", model_name)
    parts = [
        _labelled(BATCHES, "gauge", "Batches in --batch_dir, by status.", (model, "status", totals.batches)),
        _labelled(REQUESTS, "counter", "Requests of batches that ended.", (model, "result", totals.requests)),
        _single(PENDING, "Requests of open batches that have no result yet.", model, totals.pending),
        _single(BYTES, "Bytes of all files in --batch_dir.", model, totals.bytes),
    ]
    return "".join(parts).encode()


def _labelled(name: str, kind: str, help: str, series: tuple[str, str, Mapping[str, int]]) -> str:
    model, label_name, values = series
    lines = [f"{PREFIX}{name}{{{model},{label(label_name, value)}}} {count}\n" for value, count in values.items()]
    return _head(name, kind, help) + "".join(lines)


def _single(name: str, help: str, model: str, value: int) -> str:
    return f"{_head(name, 'gauge', help)}{PREFIX}{name}{{{model}}} {value}\n"


def _head(name: str, kind: str, help: str) -> str:
    return f"# HELP {PREFIX}{name} {help}\n# TYPE {PREFIX}{name} {kind}\n"
