"""The pages match the code: links, flags, endpoints, fields, metrics and examples exist, and none is missing."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any, get_args

import pytest
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route

import lightserve.messages
from benchmark.cluster.simulated_replicas import arguments as comparison_arguments
from benchmark.guard.__main__ import parser as guard_arguments
from lightserve.cli.completion.flags import all_commands
from lightserve.common import basemodel as bm, ops
from lightserve.config import ServerConfig
from lightserve.config.parse import parse_server
from lightserve.httpserver.admin.metrics_page import ENGINE_UP, NAMES
from lightserve.httpserver.anthropic.request import MessagesBody, PromptBody
from lightserve.httpserver.chat.request import ChatBody, Message
from lightserve.httpserver.fields.generation import StreamOptions, validate_supported
from lightserve.httpserver.fields.unsupported import UNSUPPORTED
from lightserve.httpserver.generate.lightllm import request as lightllm_request
from lightserve.httpserver.generate.lightllm.request import LightllmBody, LightllmParameters
from lightserve.httpserver.generate.routes import LIGHTLLM_ONLY, TGI_ONLY, Schema, schema_of
from lightserve.httpserver.generate.tgi.request import TgiBody, TgiParameters
from lightserve.httpserver.http.body import Body, validate
from lightserve.httpserver.http.middleware import is_admin_path
from lightserve.httpserver.http.unknown_fields import near_misses
from lightserve.httpserver.ollama.request import ChatRequest, GenerateRequest, Options
from lightserve.httpserver.openai.completions_request import CompletionBody
from lightserve.httpserver.openai.responses.request import ResponsesBody
from lightserve.ipc import worker_calls
from lightserve.ipc.process import ChildConfig
from lightserve.ipc.worker_calls import WorkerCall
from lightserve.links.keys import generate
from lightserve.links.kv_secret import KV_CERTIFICATE
from lightserve.messages import cluster as cluster_messages, control, nodes, output, request
from lightserve.messages.metrics import METRICS
from lightserve.models.registry import MODELS
from lightserve.simulate.__main__ import arguments as simulate_arguments
from lightserve.simulate.capacity import arguments as capacity_arguments
from lightserve.simulate.disaggregation import arguments as disaggregation_arguments
from lightserve.simulate.tiers import arguments as tiers_arguments
from test.documented_hooks import HOOKED, PAGE as ADDING_A_MODEL, Hook, documented_hooks
from test.httpserver.app_client import served
from test.models.architectures.cases import CASES

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
API_PAGES = [ROOT / "docs" / "api.md", *sorted((ROOT / "docs" / "api").glob("*.md"))]
API_TEXT = "".join(page.read_text() for page in [*API_PAGES, ROOT / "docs" / "batches.md"])
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
DATED = [page for page in PAGES if page.is_relative_to(ROOT / "docs" / "log")]  # past runs: their flags may be gone
# flags of pytest, benchmarks, test/faults, docker, kubectl and systemctl
OTHER_TOOLS = {
    "--address",  # of ray start
    "--backend",
    "--beside_sentence_transformers",
    "--clients",
    "--compare",
    "--configs",
    "--core",
    "--curve",
    "--head",  # of ray start
    "--examples",
    "--from-literal",
    "--gpus",
    "--ipc",
    "--long",
    "--minutes",
    "--move",
    "--now",
    "--custom_all_reduce",
    "--only",
    "--ops",
    "--prompt",
    "--step_ms",
    "--policy",
    "--profile",
    "--shape",
    "--shm-size",
    "--time",
    "--weights",
}
METHODS = "DELETE|GET|HEAD|POST"


def by_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_page_on_adding_a_model_is_the_model() -> None:
    page = ADDING_A_MODEL.read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)

    assert "\n\n".join(blocks) == (ROOT / "lightserve/models/qwen3/model.py").read_text()
    assert f'"qwen3": "{MODELS["qwen3"]}"' in page
    [case] = re.findall(r'^ +"qwen3": Case.*$', page, flags=re.MULTILINE)
    assert case in (ROOT / "test/models/architectures/llama_like.py").read_text()


def test_the_example_of_a_model_with_recurrent_layers_is_a_model_of_thirty_lines() -> None:
    """test_architectures.py compares it with transformers."""
    [example] = re.findall(r"```py\n(.*?)```", ADDING_A_MODEL.read_text(), flags=re.DOTALL)

    assert example == (ROOT / "lightserve/models/olmo_hybrid/model.py").read_text()
    assert len([line for line in example.splitlines() if line.strip()]) <= 30
    assert "olmo_hybrid" in CASES


FLOW = ROOT / "docs" / "request_flow.md"


def definitions_of(file: Path) -> set[str]:
    """Functions, classes and their methods, also those inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{one.name}" for one in inner}
    return found


def test_functions_on_the_page_about_a_request_are_in_the_files_beside_them() -> None:
    pairs = re.findall(r"`([\w.]+)`\s+\(?(?:in\s+)?\[`[^`]+`\]\(\.\./(lightserve/[^)]+)\)", FLOW.read_text())

    assert len(pairs) > 25
    assert [pair for pair in pairs if pair[0] not in definitions_of(ROOT / pair[1])] == []


def stops_of_the_tour() -> list[tuple[str, list[str]]]:
    """File, and the definitions in it that a reader should read."""
    page = (ROOT / "docs" / "tour.md").read_text()
    stops = re.findall(r"^### \d+\. .*\]\(\.\./(.*)\)\n\nRead ([^#]*?)\.\n\n", page, flags=re.MULTILINE)
    return [(file, re.findall(r"`([\w.]+)`", names)) for file, names in stops]


def test_the_tour_has_twenty_files_and_their_definitions_exist() -> None:
    stops = stops_of_the_tour()

    assert len({file for file, _ in stops}) == 20
    for file, names in stops:
        assert names
        assert set(names) <= definitions_of(ROOT / file), file


def test_every_hop_of_a_request_names_a_function_that_exists() -> None:
    packages = ("httpserver", "router", "detokenization", "worker", "common/basemodel", "offline")
    files = [file for package in packages for file in (ROOT / "lightserve" / package).rglob("*.py")]
    files += (ROOT / "lightserve" / "messages").glob("*.py")
    known = set().union(*map(definitions_of, files))
    text = re.sub(r"```.*?```", "", FLOW.read_text(), flags=re.DOTALL)
    hops = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    named = set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", text))

    assert len(hops) > 20
    functions = {name for name in known if "." in name or name[0].islower()}
    assert [hop for hop in hops if functions.isdisjoint(re.findall(r"`([\w.]+)`", hop))] == []
    assert {name for name in named - known if not name.endswith((".py", ".md"))} == {"lightserve"}


def test_the_page_on_kernels_names_every_op() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| .*$", page, flags=re.MULTILINE))))

    assert sorted(set(ops.OPS) - named) == []


def test_the_page_on_adding_an_op_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "adding_an_op.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "test" / "ops").glob("*.py"))

    named = re.findall(r"`(test_\w+)`", page)
    assert named
    assert [name for name in named if f"def {name}(" not in tests] == []


def hooks_of(model_part: type, not_hooks: set[str]) -> Iterator[Hook]:
    for name, method in vars(model_part).items():
        if inspect.isfunction(method) and not name.startswith("__") and name not in not_hooks:
            signature = inspect.signature(method)
            yield Hook(name, ", ".join(list(signature.parameters)[1:]), str(signature.return_annotation))


def test_the_page_on_adding_a_model_lists_every_hook_with_its_signature() -> None:
    listed = documented_hooks()
    attributes = re.findall(r"^\| `(\w+_class)` \| `(\w+)` \|", ADDING_A_MODEL.read_text(), flags=re.MULTILINE)

    assert len(listed) == len(set(listed))
    assert set(listed) == {hook for part, not_hooks in HOOKED.items() for hook in hooks_of(part, not_hooks)}
    classes = [name for name in dir(bm.TpPartBaseModel) if name.endswith("_class")]
    assert dict(attributes) == {name: getattr(bm.TpPartBaseModel, name).__name__ for name in classes}


def test_every_type_in_the_signature_of_a_hook_can_be_imported_by_a_model() -> None:
    names = {*bm.__all__, "Tensor", "None", "Any", "Iterator", "Iterable"}
    methods = [getattr(hook.owner, hook.name) for hook in documented_hooks()] + [
        vars(part)["__init__"] for part in HOOKED if "__init__" in vars(part)
    ]

    used = {word for one in methods for text in inspect.get_annotations(one).values() for word in capitalised(text)}

    assert used - {"InnerWeight", "OuterWeight", "State", "DecoderWeight"} <= names  # parameters of generic classes


def capitalised(annotation: str) -> list[str]:
    return re.findall(r"(?<!ops\.)\b[A-Z]\w+", annotation)


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_a_link_to_a_file_has_the_end_of_its_path_as_text(page: Path) -> None:
    links = re.findall(r"\[`([\w./]+\.py)`\]\(([^)#]+)\)", page.read_text())

    assert [(text, path) for text, path in links if not path.endswith(text)] == []


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_and_paths_on_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    paths = re.findall(r"`((?:lightserve|test|docs|deploy)/[\w/.-]+)`", text)

    for link in links:
        assert (page.parent / link).exists(), link
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_within_a_page_lead_to_its_headings(page: Path) -> None:
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}

    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


@pytest.mark.parametrize("page", [page for page in PAGES if page not in DATED], ids=by_name)
def test_extras_on_a_page_exist_in_the_checkout(page: Path) -> None:
    known = metadata("lightserve").get_all("Provides-Extra")
    text = page.read_text()

    assert "lightserve[" not in text  # the package is on no index
    assert set(re.findall(r"\.\[(\w+)\]", text)) <= set(known or ())


CHANNELS: dict[str, Any] = {
    "httpserver to router": request.ToRouter,
    "router to detokenizer": output.ToDetokenization,
    "detokenizer to httpserver": output.ToHttpserver,
    "dispatcher to engine": cluster_messages.GatewayToEngine,
    "engine to dispatcher": cluster_messages.EngineToGateway,
    "node to node 0": nodes.ToFirstNode,
    "node 0 to node": nodes.ToNode,
    "launcher to child": control.ToChild | ChildConfig,
    "child to launcher": control.FromChild,
}


def channel_rows() -> dict[str, set[str]]:
    """The messages of each channel. Rows that begin with "the same" belong to the channel above."""
    section = section_of(ROOT / "docs" / "processes.md", "Channels and messages")
    rows: dict[str, set[str]] = {}
    channel = ""
    for first, messages in re.findall(r"^\| (.*?) \| .*? \| (.*) \|$", section, flags=re.MULTILINE):
        if not first.startswith("the same"):
            channel = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", first)
        rows.setdefault(channel, set()).update(re.findall(r"`(\w+)`", messages))
    return rows


def section_of(page: Path, heading: str) -> str:
    return re.split(r"^##+ ", page.read_text().partition(f"## {heading}\n")[2], flags=re.MULTILINE)[0]


def test_the_page_on_processes_names_every_message_of_a_channel() -> None:
    rows = channel_rows()

    for channel, union in CHANNELS.items():
        assert rows[channel] == {message.__name__ for message in get_args(union)}, channel


def messages_in(message_type: Any) -> set[str]:
    """The structs of a type, which may be a list of them."""
    types = get_args(message_type) or (message_type,)
    return {one.__name__ for one in types if getattr(one, "__module__", "").startswith(lightserve.messages.__name__)}


def test_the_page_on_processes_names_every_call_to_workers_and_its_messages() -> None:
    calls = [value for value in vars(worker_calls).values() if isinstance(value, WorkerCall)]
    section = section_of(ROOT / "docs" / "processes.md", "Calls to workers")
    rows = re.findall(r"^\| `(\w+)`.*? \| (.*?) \| (.*?) \| .*\|$", section, flags=re.MULTILINE)
    named = {name: tuple(set(re.findall(r"`(\w+)`", cell)) for cell in cells) for name, *cells in rows}

    assert named == {call.name: (messages_in(call.request), messages_in(call.reply)) for call in calls}


def test_the_page_on_clusters_names_the_files_of_keygen(tmp_path: Path) -> None:
    made = {path.name for path in generate(tmp_path / "keys")}
    rows = re.findall(r"^\| (.*?) \|", section_of(ROOT / "docs" / "scaling" / "cluster.md", "Keys"), flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z]+\.[a-z]+)`", row)}

    assert named == made | {KV_CERTIFICATE}  # which is not made without openssl


# flags


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Of the commands of ``lightserve``, of the simulator and of the guard."""
    parsers = (
        simulate_arguments(),
        capacity_arguments(),
        disaggregation_arguments(),
        tiers_arguments(),
        comparison_arguments(),
    )
    simulator = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    commands = {spelling for command in all_commands() for flag in command.flags for spelling in flag.spellings}
    guard = {flag for action in guard_arguments()._actions for flag in action.option_strings}
    return {*commands, *simulator, *guard, "--version"}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in DATED], ids=by_name)
def test_flags_on_a_page_exist(page: Path, flags: set[str]) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))

    assert named <= flags | OTHER_TOOLS


def flag_rows() -> list[tuple[str, str, str]]:
    """Flag, default and other names in the tables of the README and of the page on flags."""
    text = README.read_text() + (ROOT / "docs" / "flags.md").read_text()
    return re.findall(r"^\| `--(\w+)` \| (.*?) \| (.*?) \|", text, flags=re.MULTILINE)


def value_of(config: ServerConfig, name: str) -> Any:
    parts = (config.worker, config.router, config.http, config.launch, config.cluster)
    return next(getattr(part, name) for part in parts if name in {field.name for field in dataclasses.fields(part)})


def test_defaults_in_tables_of_flags_are_the_defaults() -> None:
    rows = flag_rows()

    assert len(rows) > 8
    for name, default, _ in rows:
        value = value_of(parse_server([]), name)
        assert default == ("" if value in (None, []) else "off" if value is False else str(value)), name


def test_other_names_in_tables_of_flags_set_the_same_flag() -> None:
    names = [(name, other) for name, _, others in flag_rows() for other in re.findall(r"`(--[\w-]+)`", others)]

    assert len(names) > 5
    for name, other in names:
        choices = {"data_type": "float16", "kv_dtype": "fp8", "router_policy": "fifo"}
        value = (choices | {"cluster_policy": "prefix", "role": "normal"}).get(name, "1")
        if value_of(parse_server([]), name) is False:
            assert value_of(parse_server([other]), name) is True, other
        else:
            assert str(value_of(parse_server([other, value]), name)).lstrip("['").startswith(value), other


# endpoints


def endpoints_of(routes: list[BaseRoute]) -> set[str]:
    found = [route for route in routes if isinstance(route, APIRoute)]
    return {f"{method} {without_names(route.path)}" for route in found for method in route.methods or ()}


def without_names(path: str) -> str:
    return re.sub(r"\{.*?\}", "{}", path)


def test_the_api_pages_name_every_endpoint_and_no_other(tmp_path: Path) -> None:
    async def routes() -> list[BaseRoute]:
        async with served(tmp_path) as server:
            return server.app.routes

    found = asyncio.run(routes())
    of_the_framework = {f"GET {route.path}" for route in found if isinstance(route, Route)} - endpoints_of(found)
    named = {without_names(one) for one in re.findall(rf"`((?:{METHODS}) /\S*?)`", API_TEXT)}

    assert endpoints_of(found) <= named
    assert named - endpoints_of(found) <= of_the_framework


def test_the_security_page_names_every_admin_route_and_no_other(tmp_path: Path) -> None:
    async def endpoints() -> set[str]:
        async with served(tmp_path) as server:
            return endpoints_of(server.app.routes)

    [table] = re.findall(r"\| admin route \|.*\n((?: *\|.*\n)+)", (ROOT / "SECURITY.md").read_text())
    named = {without_names(one) for one in re.findall(rf"`((?:{METHODS}) /\S*?)`", table)}

    assert named == {one for one in asyncio.run(endpoints()) if is_admin_path(one.split()[1])}


# fields and metrics


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*ChatBody.model_fields, *CompletionBody.model_fields], id="openai"),
        pytest.param([*Message.model_fields, *StreamOptions.model_fields], id="parts"),
        pytest.param(list(UNSUPPORTED), id="openai-unsupported"),
        pytest.param(list(ResponsesBody.model_fields), id="responses"),
        pytest.param(list(MessagesBody.model_fields), id="messages"),
        pytest.param([*ChatRequest.model_fields, *GenerateRequest.model_fields, *Options.model_fields], id="ollama"),
        pytest.param([*LightllmBody.model_fields, *LightllmParameters.model_fields], id="lightllm"),
        pytest.param(list(lightllm_request.UNSUPPORTED), id="lightllm-unsupported"),
        pytest.param([*TgiBody.model_fields, *TgiParameters.model_fields], id="tgi"),
        pytest.param([*LIGHTLLM_ONLY, *TGI_ONLY], id="marks"),
        pytest.param([one.name for one in (*METRICS, ENGINE_UP)], id="metrics"),
        pytest.param([NAMES["lightllm"].prefix + name for name in NAMES["lightllm"].ours], id="metrics-lightllm"),
    ],
)
def test_the_api_pages_name_all(names: list[str]) -> None:
    assert [name for name in names if not re.search(rf"[`\"]{name}[`\":]", API_TEXT)] == []


# examples


def requests_of(page: Path) -> list[tuple[str, str]]:
    """Path and body of every request on a page, as a command or as the API pages show them."""
    text = page.read_text()
    commands = re.findall(r"curl -s http://127\.0\.0\.1:8000(/\S*).*?-d '(.*?)'", text, flags=re.DOTALL)
    return commands + re.findall(r"^POST (/\S*) (\{.*\})$", text, flags=re.MULTILINE)


def check_body(path: str, value: dict[str, Any]) -> Body:
    openai: dict[str, type[ChatBody] | type[CompletionBody]]
    openai = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}
    others: dict[str, type[Body]]
    others = {"/v1/responses": ResponsesBody, "/v1/messages": MessagesBody, "/v1/messages/count_tokens": PromptBody}
    if path in openai:
        return validate_supported(openai[path], value)
    if path in others:
        return validate(others[path], value)
    if path in ("/generate", "/generate_stream", "/"):
        kinds: dict[Schema, type[Body]] = {Schema.TGI: TgiBody, Schema.LIGHTLLM: LightllmBody}
        return validate(kinds[schema_of(value, Schema.LIGHTLLM)], value)
    return Body()


@pytest.mark.parametrize("page", [README, *(page for page in API_PAGES if page.name != "differences.md")], ids=by_name)
def test_requests_on_a_page_are_well_formed(page: Path) -> None:
    requests = requests_of(page)

    assert requests
    for path, body in requests:
        value = json.loads(body)
        if not re.search(rf"{re.escape(body)}\n\n4\d\d ", page.read_text()):  # else it shows an error
            assert near_misses(check_body(path, value)) == []


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_json_on_a_page_is_json(page: Path) -> None:
    text = page.read_text()
    blocks = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    events = re.findall(r"^data: ?(\{.*)$", text, flags=re.MULTILINE)
    answers = re.findall(r"^(?:4\d\d )?([{\[]\".*)$", text, flags=re.MULTILINE)

    for one in (*blocks, *events, *answers):
        json.loads(one)
