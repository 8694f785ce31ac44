"""A replica on a real Ray cluster of one node, with Ray alone: no Serve, no HAProxy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from lightserve.offline.llm import LLM
from test.ray.ray_nodes import COMMAND_S, Gateway, RayNodes, ray_nodes, status
from test.small_text import save_small_model

pytestmark = [pytest.mark.ray, pytest.mark.slow]

FLAGS = ("--max_total_token_num", "1024", "--port", "0", "--device", "cpu", "--wait_s", str(COMMAND_S))


@pytest.fixture(scope="module")
def node() -> Iterator[RayNodes]:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, ray_nodes(Path(folder), 0) as found:
        yield found


def test_a_deployed_replica_generates_the_text_of_an_llm_and_ends(node: RayNodes, tmp_path: Path) -> None:
    model = save_small_model(tmp_path)
    prompt, options = [5, 9, 3, 7], dict[str, Any](temperature=0, ignore_eos=True)
    llm = LLM(model, device="cpu", max_total_token_num=1024)
    expected = llm.generate([prompt], max_new_tokens=12, **options)[0].text

    printed = node.run("deploy", model, "--replicas", "1", "--cpus_per_replica", "0.5", *FLAGS)
    serving = [replica.takes_requests for replica in status().replicas]
    code, answer = Gateway(printed.split()[0]).post("/v1/completions", {"prompt": prompt, "max_tokens": 12, **options})
    node.call("undeploy")

    assert serving == [True]
    assert (code, answer["choices"][0]["text"]) == (200, expected)
    assert "no deployment 'lightserve'" in node.call("status", code=2)
