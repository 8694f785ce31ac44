"""Metrics of API keys, by the name that the operator gave each. They count all HTTP processes of the server."""

from __future__ import annotations

from collections.abc import Mapping

from lightserve.httpserver.admin.metrics_page import label
from lightserve.httpserver.http.key_usage import Column

# name: kind, help, and for each value of the label reason (None: no label) the column
METRICS: Mapping[str, tuple[str, str, Mapping[str | None, Column]]] = {
    "key_requests_total": ("counter", "Requests of an API key that were admitted.", {None: Column.REQUESTS}),
    "key_refused_total": (
        "counter",
        "Requests of an API key beyond its limits.",
        {"rate": Column.REFUSED_RATE, "concurrency": Column.REFUSED_CONCURRENCY},
    ),
    "key_requests_running": ("gauge", "Requests of an API key that run or wait.", {None: Column.RUNNING}),
    "key_prompt_tokens_total": ("counter", "Prompt tokens of an API key.", {None: Column.PROMPT_TOKENS}),
    "key_generation_tokens_total": ("counter", "Generated tokens of an API key.", {None: Column.OUTPUT_TOKENS}),
}


def key_metrics(model_name: str, totals: Mapping[str, Mapping[Column, int]]) -> bytes:
    lines = []
    for name, (kind, help, columns) in METRICS.items():
        full = f"lightserve_{name}"
        lines += [f"# HELP {full} {help}", f"# TYPE {full} {kind}"]
        for key, values in totals.items():
            for reason, column in columns.items():
                labels = [label("model_name", model_name), label("key", key)]
                labels += [] if reason is None else [label("reason", reason)]
                lines.append(f"{full}{{{','.join(labels)}}} {values[column]}")
    return "\n".join([*lines, ""]).encode()
