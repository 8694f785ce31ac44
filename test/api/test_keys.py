"""A server with keys accepts only requests with a key."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import openai
import pytest

from test.api.server import ServerProcess, running_server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text("# of the team\n\n  second-key \nthird-key\n")
    (folder / "keys").chmod(0o600)
    keys = ("--api_key", "first-key", "--api_key_file", str(folder / "keys"), "--admin_key", "boss")
    with running_server(folder / "log", "--null_worker", *keys) as server:
        yield server


def test_the_openai_client_needs_a_key(guarded: ServerProcess) -> None:
    def ask(key: str) -> str:
        client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0)
        response = client.completions.create(model="SmolLM2-135M-Instruct", prompt="Hello", max_tokens=3)
        return response.choices[0].finish_reason

    assert ask("first-key") == ask("second-key") == ask("boss") == "length"
    with pytest.raises(openai.AuthenticationError) as refused:
        ask("First-key")
    assert refused.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    "path", ["/metrics", "/v1/models", "/version", "/info", "/token_load", "/get_server_info", "/openapi.json"]
)
def test_every_other_route_needs_a_key(guarded: ServerProcess, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(guarded.url + path)
    with_key = urllib.request.Request(guarded.url + path, headers={"x-api-key": "second-key"})

    assert refused.value.code == 401
    assert urllib.request.urlopen(with_key).status == 200


@pytest.mark.parametrize("path", ["/health", "/healthz", "/liveness", "/readiness"])
def test_health_needs_no_key(guarded: ServerProcess, path: str) -> None:
    assert urllib.request.urlopen(guarded.url + path).status == 200


@pytest.mark.parametrize(
    ("key", "status"), [("boss", 200), ("third-key", 403), ("nobody", 401), ("# of the team", 401)]
)
def test_aborting_requests_of_others_needs_the_admin_key(guarded: ServerProcess, key: str, status: int) -> None:
    found, response = guarded.post("/abort_request", {"request_id": "nobody-has-it"}, Authorization=f"Bearer {key}")

    assert found == status
    if status == 403:
        error = response["error"]
        assert (error["type"], error["code"]) == ("permission_error", "insufficient_permissions")


def test_keys_are_not_logged(guarded: ServerProcess) -> None:
    assert not any(key in guarded.log for key in ("first-key", "second-key", "third-key", "boss"))
