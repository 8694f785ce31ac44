"""Videos through a real server on a CPU. The oracle is transformers, with frames that are chosen here by hand."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from test.api.image_chats import NEW_TOKENS, ask, data_url, part_of
from test.api.server import ServerProcess, running_server
from test.vision_model import END, START, VIDEO, VOCAB_SIZE, picture, preprocessor_of, save_vision_model

MERGE, TIMES = 2, 2
POOL = 2000  # tokens, and so the longest request
UNKNOWN = 0  # what a word of a time becomes


@dataclass
class Served:
    model_type: str
    model: Any
    server: ServerProcess

    @property
    def is_third(self) -> bool:
        return self.model_type == "qwen3_vl"


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", pytest.param("qwen2_vl", marks=pytest.mark.long)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, model = save_vision_model(tmp_path_factory.mktemp("vision"), request.param)
    flags = ("--model_dir", folder, "--device", "cpu", "--max_total_token_num", str(POOL), "--embed_cache_gb", "0.01")
    with running_server(tmp_path_factory.mktemp("server") / "log", *flags) as server:
        yield Served(request.param, model, server)


def frames(count: int, width: int = 100, height: int = 80) -> list[Image.Image]:
    return [picture(width, height, 50 + number) for number in range(count)]


def animation(images: Sequence[Image.Image], milliseconds: int, kind: str = "PNG") -> str:
    buffer = io.BytesIO()
    lossless = {"lossless": True} if kind == "WEBP" else {}
    images[0].save(buffer, kind, save_all=True, append_images=images[1:], duration=milliseconds, loop=0, **lossless)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(buffer.getvalue()).decode()


def file_part(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def frames_part(images: Sequence[Image.Image], fps: float) -> dict[str, Any]:
    return {"type": "video", "video": [data_url(image) for image in images], "fps": fps}


def joined(images: Sequence[Image.Image]) -> dict[str, Any]:
    """As vLLM's clients send frames: JPEG files with commas between them."""
    return file_part("data:video/jpeg;base64," + ",".join(base64.b64encode(jpeg(image)).decode() for image in images))


def jpeg(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def chat(*parts: str | dict[str, Any]) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    return [{"role": "user", "content": content}]


def patches(images: Sequence[Image.Image], size: tuple[int, int], model_type: str) -> tuple[Any, Any]:
    """As the video processors of transformers order them, which need torchvision."""
    files = preprocessor_of(model_type)
    patch = files.get("patch_size", 14)
    padded = [*images, *[images[-1]] * (-len(images) % TIMES)]
    pixels = np.stack([np.asarray(image.resize(size, Image.Resampling.BICUBIC)) for image in padded])
    values = (pixels / 255 - np.array(files["image_mean"])) / np.array(files["image_std"])
    times, rows, columns = len(padded) // TIMES, size[1] // patch, size[0] // patch
    grid = values.transpose(0, 3, 1, 2).reshape(
        times, TIMES, 3, rows // MERGE, MERGE, patch, columns // MERGE, MERGE, patch
    )
    ordered = grid.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(times * rows * columns, -1)
    return torch.from_numpy(ordered).float(), torch.tensor([[times, rows, columns]])


def expected(served: Served, images: Sequence[Image.Image], size: tuple[int, int], seconds: float) -> str:
    """After w1 w5, the video, w12, w2. ``size``: of the frames; ``seconds``: from a token's frames to the next."""
    values, grid = patches(images, size, served.model_type)
    times, rows, columns = grid[0].tolist()
    tokens = [VIDEO] * (rows * columns // MERGE**2)
    alone, together = [UNKNOWN, UNKNOWN, START, *tokens, END] * times, [START, *tokens * times, END]
    video = alone if served.is_third else together
    ids = [1, 5, *video, 12, 2]
    inputs = {"pixel_values_videos": values, "video_grid_thw": grid}
    if served.model_type == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([seconds])
    begin = len(ids)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            tensor = torch.tensor([ids])
            out = served.model(input_ids=tensor, mm_token_type_ids=(tensor == VIDEO).int() * 2, **inputs)
            ids.append(int(out.logits[0, -1].argmax()))
    return " ".join(f"w{token_id}" for token_id in ids[begin:] if token_id < VOCAB_SIZE)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_text_after_an_animation_is_that_of_transformers(served: Served, kind: str) -> None:
    images = frames(8)
    chosen = [0, 2, 5, 7] if served.is_third else [0, 2, 4, 6]  # two a second of four
    size = (96, 64) if served.is_third else (112, 84)

    text, usage = ask(served.server, chat("w5", file_part(animation(images, 250, kind)), "w12"))

    assert text == expected(served, [images[number] for number in chosen], size, 1.0)
    assert usage["prompt_tokens_details"]["image_tokens"] == 2 * (6 if served.is_third else 12)


def test_text_after_a_list_of_frames_is_that_of_transformers(served: Served) -> None:
    images = frames(3)
    size = (96, 64) if served.is_third else (112, 84)

    text, _ = ask(served.server, chat("w5", frames_part(images, 2), "w12"))

    assert text == expected(served, images, size, 1.0)


def test_text_after_frames_in_one_url_is_that_of_transformers(served: Served) -> None:
    images = frames(3)
    decoded = [Image.open(io.BytesIO(jpeg(image))).convert("RGB") for image in images]
    size = (96, 64) if served.is_third else (112, 84)

    text, _ = ask(served.server, chat("w5", {**joined(images), "fps": 2}, "w12"))

    assert text == expected(served, decoded, size, 1.0)


def test_the_same_video_is_taken_from_the_cache_and_one_of_another_speed_is_not(served: Served) -> None:
    images = frames(4, 90, 90)
    _, first = ask(served.server, chat("w5", frames_part(images, 2), "w9"))
    _, again = ask(served.server, chat("w5", frames_part(images, 2), "w10"))
    _, slower = ask(served.server, chat("w5", frames_part(images, 0.5), "w10"))

    length = first["prompt_tokens"]
    assert again["prompt_tokens_details"]["cached_tokens"] == length - 2
    if served.model_type == "qwen2_5_vl":  # of the others the positions are the same, and times that are one word here
        assert slower["prompt_tokens_details"]["cached_tokens"] == 3


def test_a_video_and_images_of_a_chat_stand_in_their_places(served: Served) -> None:
    image, images = picture(84, 84, 7), frames(2)
    video = frames_part(images, 2)

    first, one = ask(served.server, chat(part_of(image), video, "w9"))
    second, other = ask(served.server, chat(video, part_of(image), "w9"))

    assert first != second
    assert one["prompt_tokens"] == other["prompt_tokens"]


def refusal(served: Served, part: dict[str, Any], max_tokens: int = 1) -> str:
    return refusals(served, [part], max_tokens)


def refusals(served: Served, parts: Sequence[dict[str, Any]], max_tokens: int = 1) -> str:
    body = {"messages": chat("w5", *parts), "max_tokens": max_tokens}
    status, response = served.server.post("/v1/chat/completions", body)
    assert status == 400, response
    message: str = response["error"]["message"]
    return message


@pytest.mark.parametrize("fps", [0.009, 1e-4, 1e-9, 1e-300, 5e-324, 0, -1, 1001, True, "2"])
def test_a_rate_outside_its_limits_is_refused(served: Served, fps: Any) -> None:
    assert "must be a number from 0.01 to 1000" in refusal(served, frames_part(frames(2), fps))


def test_a_slow_video_has_no_positions_behind_the_last_of_the_model(served: Served) -> None:
    images, fps = frames(16, 60, 60), 0.0144  # of Qwen2.5-VL the last two stand at 1944
    room = {"max_tokens": None} if served.model_type == "qwen2_5_vl" else {}

    _, usage = ask(served.server, chat("w5", frames_part(images, fps), "w12"), **room)

    if served.model_type == "qwen2_5_vl":
        behind = usage["prompt_tokens"] - usage["prompt_tokens_details"]["image_tokens"] + 1945
        assert usage["completion_tokens"] == POOL - behind
        assert "videos are so slow" in refusal(served, frames_part(images, 0.01))
        assert "use max_tokens <=" in refusal(served, frames_part(images, fps), max_tokens=100)
        gif = animation(images, 655_350, "GIF")
        assert "videos are so slow" in refusal(served, file_part(gif))
    ask(served.server, chat("w5"))  # the worker lives


def test_videos_that_cannot_be_read_are_refused(served: Served) -> None:
    whole = animation(frames(4), 100)
    head, _, data = whole.partition(",")
    cut = base64.b64encode(base64.b64decode(data)[:-200]).decode()

    assert "the PNG video is damaged" in refusal(served, file_part(f"{head},{cut}"))
    assert "not an image of a known format" in refusal(served, file_part("data:video/mp4;base64,AAAA"))
    assert "must have one size" in refusal(served, frames_part([picture(60, 60), picture(60, 90)], 2))
    assert "a list of 1 to 128 URLs" in refusal(served, frames_part([picture(60, 60)] * 129, 2))
    assert "a list of 1 to 128 URLs" in refusal(served, {"type": "video", "video": []})

    one = base64.b64encode(jpeg(picture(60, 60))).decode()
    url = f"data:video/jpeg;base64,{one}"
    assert "its frame 1: not an image of a known format" in refusal(served, file_part("data:video/jpeg;base64,"))
    assert "video 1 of the request: its frame 2: its data is not base64" in refusal(served, file_part(f"{url},?"))
    assert "its frame 2: not an image of a known format" in refusal(served, file_part(f"{url},AAAA"))
    assert "the JPEG image is damaged" in refusal(served, file_part(f"{url},{one[: len(one) // 8 * 4]}"))
    assert "it has more than 128 frames" in refusal(served, file_part(url + f",{one}" * 128))
    assert "the request has 17 videos; the limit is 16" in refusals(served, [file_part(url)] * 17)
    assert "it has more than 128 frames" in refusal(served, file_part(url + "," * 10**6))
