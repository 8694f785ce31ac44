from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from lightserve.config.parse import option_types, parse_server, server_parser
from lightserve.httpserver.admin.metrics_page import NAMES
from lightserve.messages.metrics import METRICS
from lightserve.utils import former_names

FLAGS = [(flag, former) for flag, names in former_names.FLAGS.items() for former in names]


@pytest.mark.parametrize(("flag", "former"), FLAGS)
def test_a_former_name_of_a_flag_is_parsed_and_not_listed(flag: str, former: str) -> None:
    actions = server_parser()._option_string_actions

    assert former not in option_types()
    for spelling in (f"--{former}", f"--{former.replace('_', '-')}"):
        assert actions[spelling].dest == actions[f"--{flag}"].dest == flag
        assert actions[spelling].help == argparse.SUPPRESS
        assert (actions[spelling].type, actions[spelling].nargs) == (
            actions[f"--{flag}"].type,
            actions[f"--{flag}"].nargs,
        )


def test_a_flag_may_have_its_former_name_in_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(former_names.FLAGS, "max_queue_size", ("longest_queue",))
    (tmp_path / "flags.yaml").write_text("longest_queue: 7")

    assert parse_server(["--longest-queue", "5"]).router.max_queue_size == 5
    assert parse_server(["--config", str(tmp_path / "flags.yaml")]).router.max_queue_size == 7
    assert parse_server(["--max_queue_size", "6"]).router.max_queue_size == 6


def test_a_metric_is_exported_by_its_former_name_too() -> None:
    known = {metric.name for metric in METRICS}

    for former, name in former_names.METRICS.items():
        assert former not in known
        assert name in known
        assert NAMES["lightserve"].ours[former] == name
