"""The dashboard and the alert rules of deploy/monitoring, against the metrics that the application exports.

The names and labels are checked everywhere. promtool (Debian's package prometheus) evaluates the expressions where it
is installed.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from lightserve.messages.metrics import METRICS, image_histogram
from lightserve.messages.output import RouterStats
from lightserve.messages.request import ImageCounts, SpanCounts, StreamLogCounts
from lightserve.router.observability.stats import RouterMetrics
from lightserve.utils import former_names
from test.httpserver.app_client import served

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
SCRAPE_LABELS = {"instance", "job"}  # Prometheus adds them to every metric
OF_PROMETHEUS = {"up": SCRAPE_LABELS}
VARIABLES = {"$model": ".*", "$instance": ".*", "$__rate_interval": "5m"}
KEYWORDS = {"and", "by", "on", "or", "unless", "without"}
WINDOW = 60  # minutes of samples

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed; Debian: apt-get install prometheus"
)


@dataclass(frozen=True)
class Query:
    place: str
    text: str


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[Query]:
    for panel in panels():
        for target in panel["targets"]:
            yield Query(f"panel {panel['title']} {target['refId']}", substituted(target["expr"]))
    for annotation in DASHBOARD["annotations"]["list"]:
        yield Query(f"annotation {annotation['name']}", substituted(annotation["expr"]))
    for rule in RULES:
        yield Query(f"alert {rule['alert']}", rule["expr"])


def substituted(text: str) -> str:
    for name, value in VARIABLES.items():
        text = text.replace(name, value)
    assert "$" not in text, text
    return text


def traffic(metrics: RouterMetrics, requests: int) -> None:
    """What ``requests`` requests count, each with every event that a metric has."""
    for _ in range(requests):
        metrics.admitted(queue_s=0.2, prompt_tokens=100, cached_tokens=64)
        metrics.first_token(ttft_s=0.75, prefill_s=0.25)
        metrics.next_tokens(itl_s=0.02, count=9)
        metrics.forced(2)
        metrics.step(109)
        for reason in ("stop", "length", "abort"):
            metrics.finished(reason, 4.0, 2.0, 3.0, prompt_tokens=100, output_tokens=10, max_new_tokens=50)
        metrics.refused()
        metrics.failed()
        metrics.numerical_errors(1)
        metrics.workers_restarted()
        metrics.preempted()
        metrics.evicted(10)
        metrics.add_http_counts(SpanCounts(4, 1))
        metrics.add_http_counts(StreamLogCounts(lost=1, resumed=2, taken_over=1))
        metrics.encoded({"decode": 0.01, "resize": 0.02, "encode": 0.1})
        metrics.add_http_counts(ImageCounts(0, [1, *image_histogram().counts[1:]], 0.001, 2, {"file": 1}))
    metrics.set_load(running=4, waiting=2, used_tokens=500, total_tokens=1000)


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> list[list[Sample]]:
    """Two scrapes of a running application, with traffic before each."""
    found: list[list[Sample]] = []

    async def run(run_dir: Path) -> None:
        metrics = RouterMetrics()
        async with served(run_dir) as server:
            for _ in range(2):
                traffic(metrics, 10)
                snapshot = metrics.snapshot()
                for name in (metric.name for metric in METRICS if metric.label in ("engine", "kv_group", "role")):
                    snapshot.labelled[name]["0"] = 1.0  # as with --dp, or sliding windows
                server.context.manager.stats = RouterStats(0.0, snapshot)
                text = (await server.get("/metrics")).text
                found.append([one for family in text_string_to_metric_families(text) for one in family.samples])

    asyncio.run(run(tmp_path_factory.mktemp("run")))
    return found


def labels_by_name(samples: list[Sample]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for sample in samples:
        found.setdefault(sample.name, set()).update(sample.labels)
    return {name: labels | SCRAPE_LABELS for name, labels in found.items()} | OF_PROMETHEUS


def mistakes(text: str, known: dict[str, set[str]]) -> list[str]:
    """Names and labels of an expression that no metric has."""
    selectors = re.findall(r"([a-zA-Z_:][\w:]*)\s*\{(.*?)\}", text)
    wrong = [
        f"{name} has no label {label}"
        for name, matchers in selectors
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)
        if label not in known.get(name, set())
    ]
    bare = re.sub(r"\{.*?\}|\[.*?\]|\"[^\"]*\"", "", text)
    grouped = {label for group in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", bare) for label in group.split(",")}
    bare = re.sub(r"\b(?:by|on|without)\s*\([^)]*\)", "", bare)
    names = set(re.findall(r"[a-zA-Z_:][\w:]*(?!\w|\s*\()", bare)) - KEYWORDS
    names = {name for name in names if not re.search(rf"\b{name}\s*\(", bare)}
    wrong += [f"{name} is not exported" for name in names if name not in known]
    labels = set().union(*(known.get(name, set()) for name in names))
    return wrong + [f"no metric has the label {one}" for one in {one.strip() for one in grouped} - labels]


@pytest.mark.parametrize("query", list(queries()), ids=lambda query: query.place)
def test_every_metric_of_a_query_is_exported_with_these_labels(query: Query, scrapes: list[list[Sample]]) -> None:
    assert "lightserve_" in query.text or "up{" in query.text
    assert mistakes(query.text, labels_by_name(scrapes[0])) == []


@pytest.mark.parametrize(
    "text",
    [
        "sum(rate(lightserve_generation_token_total[5m]))",
        "sum(rate(lightserve_time_to_first_token_seconds[5m]))",
        'lightserve_engine_up{model="m"}',
        "sum by (reason) (lightserve_request_success_total)",
        "num_requests_running > 3",
    ],
)
def test_a_wrong_name_or_label_would_be_found(text: str, scrapes: list[list[Sample]]) -> None:
    assert len(mistakes(text, labels_by_name(scrapes[0]))) == 1


def test_the_variables_of_the_dashboard_are_labels_of_the_metric(scrapes: list[list[Sample]]) -> None:
    known = labels_by_name(scrapes[0])
    variables = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]

    assert len(variables) == 2
    for variable in variables:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
        assert label in known[name]


def test_every_metric_is_on_the_dashboard(scrapes: list[list[Sample]]) -> None:
    shown = " ".join(query.text for query in queries())
    exported = {re.sub(r"_(bucket|sum|count|created)$", "", sample.name) for sample in scrapes[0]}
    exported -= {f"lightserve_{name}" for name in former_names.METRICS}

    assert {name for name in exported if name not in shown} <= {
        "lightserve_request_inference_time_seconds",  # the sum of prefill and decode
        "lightserve_otlp_spans_exported_total",
        "lightserve_spec_decode_synthetic",  # of benchmarks
    }


def test_panels_have_titles_units_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    for panel in panels():
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_every_alert_says_what_it_means() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}


def promtool(*arguments: str, folder: Path = FOLDER) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@needs_promtool
def test_promtool_accepts_the_rules_and_the_example() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    tested = (FOLDER / "alerts_test.yml").read_text()

    promtool("test", "rules", "alerts_test.yml")
    assert all(tested.count(rule["alert"]) == 2 for rule in RULES)  # a server that is well, and one that is not


def series_of(scrapes: list[list[Sample]]) -> list[dict[str, str]]:
    """The samples of two scrapes as series that grow from the first as to the second, minute by minute."""
    found = []
    for first, second in zip(*scrapes, strict=True):
        labels = {**first.labels, "instance": "here:8000", "job": "lightserve"}
        text = ", ".join(f'{name}="{value}"' for name, value in labels.items())
        growth = second.value - first.value
        found.append({"series": f"{first.name}{{{text}}}", "values": f"{first.value:g}+{growth:g}x{WINDOW}"})
    return found


@needs_promtool
def test_every_query_of_the_dashboard_has_a_result(tmp_path: Path, scrapes: list[list[Sample]]) -> None:
    """Over a recorded scrape, every one gives at least one number, and none that is NaN."""
    tests = [
        {
            "expr": f"clamp_max(count(({query.text}) == ({query.text})), 1)",
            "eval_time": f"{WINDOW}m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for query in queries()
        if not query.place.startswith("alert")
    ]
    case = {"interval": "1m", "input_series": series_of(scrapes), "promql_expr_test": tests}
    (tmp_path / "panels.yml").write_text(json.dumps({"rule_files": [], "evaluation_interval": "1m", "tests": [case]}))

    promtool("test", "rules", "panels.yml", folder=tmp_path)
    assert len(tests) > 40
