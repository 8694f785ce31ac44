"""Whether a server reads images is decided at its start."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from shutil import copy as copy_file
from types import SimpleNamespace

import pytest

from lightserve.config.parse import parse_server
from lightserve.errors import OptionError
from lightserve.model_files.config.images import read_image_files
from lightserve.model_files.source import resolve
from lightserve.server import images
from lightserve.server.images import with_images
from test.vision_families import save_family
from test.vision_model import save_vision_model


@pytest.fixture(scope="module")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision_model(tmp_path_factory.mktemp("vision"))[0]


def limit_of(*flags: str) -> int:
    return with_images(parse_server([*flags])).http.media_limits["image"]


def test_a_model_that_reads_images_gets_them_by_default(vision_folder: str) -> None:
    assert limit_of("--model_dir", vision_folder) == 16


@pytest.mark.parametrize("text", ["image=3", "3", '{"image": 3}'])
def test_the_limit_may_be_written_as_in_other_servers(vision_folder: str, text: str) -> None:
    assert limit_of("--model_dir", vision_folder, "--limit-mm-per-prompt", text) == 3


@pytest.mark.parametrize(
    "text", ["image=x", "sound=1", "image=-1", "image=1,video", '{"image": 1, "sound": 2}', "image=5000", "{}"]
)
def test_a_wrong_limit_is_refused(text: str) -> None:
    with pytest.raises(
        OptionError, match="must be image=N, video=N, audio=N or several with commas, with N from 0 to 1024"
    ):
        parse_server(["--limit_mm_per_prompt", text])


@pytest.mark.parametrize(
    ("text", "images", "videos"),
    [
        ("image=3", 3, 3),
        ("video=2", 16, 2),
        ("image=0,video=2", 0, 2),
        ("video=0, image=4", 4, 0),
        ('{"image": 5, "video": 1}', 5, 1),
    ],
)
def test_videos_may_have_a_limit_of_their_own(vision_folder: str, text: str, images: int, videos: int) -> None:
    http = with_images(parse_server(["--model_dir", vision_folder, "--limit_mm_per_prompt", text])).http

    assert http.media_limits == {"image": images, "video": videos, "audio": 0}


def test_bodies_with_images_may_be_larger(vision_folder: str, small_folder: str) -> None:
    def mib(*flags: str) -> float:
        return with_images(parse_server(["--model_dir", *flags])).http.body_limit / 2**20

    assert mib(vision_folder) == 64
    assert mib(vision_folder, "--limit_mm_per_prompt", "0") == mib(small_folder) == 16
    assert mib(vision_folder, "--max_body_bytes", str(2**20)) == 1


def test_the_operator_may_want_none(vision_folder: str) -> None:
    assert limit_of("--model_dir", vision_folder, "--limit_mm_per_prompt", "0") == 0


def test_a_text_model_has_none_and_refuses_a_limit(small_folder: str) -> None:
    assert limit_of("--model_dir", small_folder) == 0
    with pytest.raises(OptionError, match="images and sounds of this model are not read here"):
        limit_of("--model_dir", small_folder, "--limit_mm_per_prompt", "image=2")


def test_a_flag_that_does_not_combine_turns_images_off_and_the_log_says_why(
    vision_folder: str, log: pytest.LogCaptureFixture
) -> None:
    with log.at_level(logging.WARNING):
        assert limit_of("--model_dir", vision_folder, "--null_worker") == 0

    reason = "requests may have no images or sounds: --limit_mm_per_prompt cannot be used with --null_worker"
    assert reason in log.text


def test_files_and_packages_that_are_missing_turn_images_off(
    vision_folder: str, tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text((Path(vision_folder) / "config.json").read_text())
    with log.at_level(logging.WARNING):
        assert limit_of("--model_dir", str(tmp_path)) == 0
        monkeypatch.setattr(images, "find_spec", lambda name: SimpleNamespace() if name != "PIL" else None)
        assert limit_of("--model_dir", vision_folder) == 0

    assert "has no preprocessor_config.json; fetch it" in log.text
    assert "the package pillow is missing" in log.text


def test_the_file_of_all_processors_is_enough(vision_folder: str, tmp_path: Path) -> None:
    """As transformers 5 saves them."""
    folder = Path(vision_folder)
    copy_file(folder / "config.json", tmp_path / "config.json")
    values = json.loads((folder / "preprocessor_config.json").read_text())
    videos = {"size": {"shortest_edge": 999, "longest_edge": 9999}}
    processors = {"image_processor": values, "video_processor": videos, "processor_class": "Qwen2_5_VLProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(processors))

    files = read_image_files(resolve(str(tmp_path), needs_weights=False))

    assert files.preprocessor == values
    assert files.video == videos
    assert limit_of("--model_dir", str(tmp_path)) == 16


def test_a_file_of_all_processors_without_that_of_images_is_not(
    vision_folder: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    copy_file(Path(vision_folder) / "config.json", tmp_path / "config.json")
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Qwen2_5_VLProcessor"}')

    with log.at_level(logging.WARNING):
        assert limit_of("--model_dir", str(tmp_path)) == 0

    assert "has no preprocessor_config.json; fetch it" in log.text


def test_a_model_whose_images_all_have_more_tokens_than_the_limit_reads_none(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    save_family(tmp_path, "llava")

    with log.at_level(logging.WARNING):
        assert limit_of("--model_dir", str(tmp_path), "--max_image_tokens", "15") == 0

    assert "max_image_tokens=15: an image of this model has 16 tokens; raise it" in log.text
    assert limit_of("--model_dir", str(tmp_path), "--max_image_tokens", "16") == 16
