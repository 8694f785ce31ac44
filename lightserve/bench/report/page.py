"""The report as one HTML file."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape

from lightserve.bench.client.results import Results
from lightserve.bench.report.sections import overview, run_section, sweep_plots
from lightserve.bench.report.style import CSS
from lightserve.bench.report.svg import reset_ids

# Names and errors come from a server; nothing of them may run or be loaded
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
DEFINITIONS = """
<details><summary>What the figures mean</summary>
<p><b>TTFT</b>: from sending a request to the first event with output. <b>E2E</b>: to the last one.
<b>TPOT</b>: (E2E - TTFT) / (output tokens - 1). <b>ITL</b>: time between two events of a request; an event may have
several tokens. <b>Throughput</b>: of completed requests, over the time from the start to the end of the last response.
<b>Goodput</b>: requests that met every limit of the SLO. A percentile is interpolated between the nearest values.
The last bar of a distribution also has the values above the 99.5th percentile.</p></details>
"""


def page_of(results: Results) -> str:
    reset_ids()
    when = datetime.fromtimestamp(results.created, UTC).strftime("%Y-%m-%d %H:%M UTC")
    title = f"Benchmark of {results.label}"
    processes = int(results.options.get("processes", 1))
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_subtitle(results))} · {when}</p>',
        overview(results) if len(results.runs) > 1 else "",
        sweep_plots(results),
        "<h2>Each run</h2>" if len(results.runs) > 1 else "",
        *(run_section(run, processes, len(results.runs) == 1) for run in results.runs),
        "<h2>How it was measured</h2>",
        DEFINITIONS,
        _options(results),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main>\n{''.join(parts)}\n</main></body></html>\n"
    )


def _subtitle(results: Results) -> str:
    options = results.options
    return f"{results.model} at {results.url} · {options.get('api', '')} · dataset {options.get('dataset', '')}"


def _options(results: Results) -> str:
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>"
        for name, value in results.options.items()
        if value not in (None, {}, False)
    )
    return f'<details><summary>Options</summary><dl class="options">{rows}</dl></details>'
