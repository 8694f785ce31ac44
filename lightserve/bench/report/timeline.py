"""The timeline of a run: one bar per request, from sending over the first token to the end."""

from __future__ import annotations

from html import escape

from lightserve.bench.client.results import RequestTimes, Run
from lightserve.bench.report.scale import Scale, number
from lightserve.bench.report.svg import svg, text

WIDTH = 1160
LEFT, RIGHT, TOP, BOTTOM = 16, 16, 34, 40
MAX_ROWS = 200  # more would be thinner than a pixel
MAX_HEIGHT = 420


def shown_requests(run: Run) -> list[RequestTimes]:
    """All requests in the order of sending, or every nth one and those that failed, as far as there is room."""
    ordered = sorted(run.requests, key=lambda request: request.sent)
    if len(ordered) <= MAX_ROWS:
        return ordered
    every = -(-len(ordered) // MAX_ROWS)
    return [request for i, request in enumerate(ordered) if i % every == 0 or request.error][: 2 * MAX_ROWS]


def timeline_plot(run: Run) -> str:
    requests = shown_requests(run)
    row = max(2.0, min(14.0, MAX_HEIGHT / max(len(requests), 1)))
    base = TOP + row * len(requests)
    scale = Scale(0.0, max(run.seconds, 1e-6), LEFT, WIDTH - RIGHT)
    body = _axis(scale, base) + _legend(any(request.error for request in requests))
    for i, request in enumerate(requests):
        body += _bars(request, scale, TOP + i * row, row * 0.8)
    shown = "" if len(requests) == len(run.requests) else f", {len(requests)} of {len(run.requests)} shown"
    description = f"{len(run.requests)} requests in {run.seconds:.1f} seconds{shown}; {run.failed} failed."
    return svg(WIDTH, round(base + BOTTOM), f"Timeline of requests, {run.name}", description, body)


def _axis(scale: Scale, base: float) -> str:
    parts = [f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base:.1f}" y2="{base:.1f}" class="axis"/>']
    for tick in scale.ticks():
        x = scale(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{base + 4:.1f}" class="grid"/>')
        parts.append(text(x, base + 17, number(tick)))
    parts.append(text(WIDTH / 2, base + 34, "seconds", "label"))
    return "".join(parts)


def _legend(has_failed: bool) -> str:
    parts, x = [], float(LEFT)
    names = [("c2", "until the first token"), ("c1", "output"), *([("bad", "failed")] if has_failed else [])]
    for style, name in names:
        parts.append(f'<rect x="{x}" y="7" width="14" height="10" class="bar {style}"/>')
        parts.append(text(x + 20, 16, name, "key", "start"))
        x += 40 + 7 * len(name)
    return "".join(parts)


def _bars(request: RequestTimes, scale: Scale, y: float, height: float) -> str:
    if request.error:
        parts = _bar(scale(request.sent), scale(request.end), y, height, "bad")
        tip = f"sent at {request.sent:.2f} s, failed: {request.error}"
    else:
        first = request.end if request.first is None else request.first
        parts = _bar(scale(request.sent), scale(first), y, height, "c2")
        parts += _bar(scale(first), scale(request.end), y, height, "c1")
        ttft_ms, e2e_ms = (first - request.sent) * 1e3, (request.end - request.sent) * 1e3
        counts = f"{request.input_tokens} tokens in, {request.output_tokens} out"
        tip = f"sent at {request.sent:.2f} s, TTFT {ttft_ms:.0f} ms, E2E {e2e_ms:.0f} ms, {counts}"
    return f"<g><title>{escape(tip)}</title>{parts}</g>"


def _bar(begin: float, end: float, y: float, height: float, style: str) -> str:
    width = max(end - begin, 4.0 if style == "bad" else 0.4)
    return f'<rect x="{begin:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="bar {style}"/>'
