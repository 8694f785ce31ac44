from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark import make_adapters
from benchmark.kernels import lora
from lightserve.errors import ServerError
from lightserve.model_files.lora.adapter import check_base, read_adapter
from test.benchmark.test_static import TINY


@pytest.mark.parametrize("mode", [[], ["--linears"]])
def test_the_table_has_a_row_for_each_product_and_number_of_tokens(
    mode: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lora.main(["--device", "cpu", "--tokens", "1", "20", *mode])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("float32 on cpu; copy ")
    products = [["1", "qkv"], ["1", "down"], ["20", "qkv"], ["20", "down"]]
    assert [line.split()[:2] for line in lines[2:]] == products


def test_tiles_are_compared_on_a_gpu_only() -> None:
    with pytest.raises(ServerError, match="needs a GPU"):
        lora.main(["--device", "cpu", "--configs"])


def test_the_least_memory_is_that_of_the_adapters_in_use() -> None:
    load = lora.Load(in_size=10, parts=(6, 4), tokens=2, adapters=8, rank=3)

    assert load.num_bytes(2) == 2 * (2 * 3 * (2 * 10 + 10) + 2 * (10 + 2 * 10))


def test_random_adapters_fit_their_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))

    make_adapters.main(["--model_dir", str(tmp_path), "--out", str(tmp_path), "--count", "2", "--requests", "3"])

    sizes = make_adapters.target_sizes(str(tmp_path))
    assert len(sizes) == 7 * TINY["num_hidden_layers"]  # type: ignore[operator]
    check_base(read_adapter(tmp_path / "a1"), sizes)
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [line["model"] for line in lines] == ["a0", "a1", "a0"]
