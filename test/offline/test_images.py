"""Images of prompts in an LLM without a server. The oracle is transformers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightserve import LLM
from lightserve.errors import InvalidRequestError, TextOnlyError
from test.api.image_chats import NEW_TOKENS, data_url, expected
from test.vision_model import END, PAD, START, picture, png, save_vision_model

FIELDS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def llm(vision_model: tuple[str, Any]) -> Iterator[LLM]:
    with LLM(vision_model[0], device="cpu", max_total_token_num=2000, embed_cache_gb=0.01) as llm:
        yield llm


def says(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def test_every_form_of_an_image_gives_the_text_of_transformers(
    llm: LLM, vision_model: tuple[str, Any], tmp_path: Path
) -> None:
    image = picture(84, 112, 1)
    path = tmp_path / "cat.png"
    path.write_bytes(png(image))
    forms: list[dict[str, Any]] = [
        {"type": "image", "image": image},
        {"type": "image_pil", "image_pil": image},
        {"type": "image", "image": path},
        {"type": "image", "path": str(path)},
        {"type": "image", "image": png(image)},
        {"type": "image_url", "image_url": {"url": data_url(image)}},
        {"type": "image_url", "image_url": f"file://{path}"},
    ]

    outs = llm.chat([says(form, text("w40")) for form in forms], **FIELDS)

    assert [out.text for out in outs] == [expected(vision_model[1], [1, image, 40, 2])] * len(forms)
    assert outs[0].prompt_ids == [1, START, *[PAD] * 12, END, 40, 2]


def test_prompts_of_vllm_have_the_text_of_chats(llm: LLM, vision_model: tuple[str, Any]) -> None:
    first, second = picture(84, 112, 12), picture(60, 90, 13)
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    prompts: list[Any] = [
        {"prompt": f"w1 {place} w40 w2", "multi_modal_data": {"image": first}},
        {"prompt_token_ids": [1, START, PAD, END, 40, 2], "multi_modal_data": {"image": [png(first)]}},
        {"prompt": f"w1 {place} w7 {place} w2", "multi_modal_data": {"image": [first, second]}},
        {"prompt": "w1 w5 w2", "multi_modal_data": None},
    ]

    texts = [out.text for out in llm.generate(prompts, **FIELDS)]
    alone = llm.generate(prompts[0], n=2, **FIELDS)

    one, two = expected(vision_model[1], [1, first, 40, 2]), expected(vision_model[1], [1, first, 7, second, 2])
    assert texts == [one, one, two, expected(vision_model[1], [1, 5, 2])]
    assert [out.text for out in alone] == [one, one]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "w1", "multi_modal_data": {"image": picture(60, 60)}}, "0 places for 1 images"),
        ({"prompt": "w1", "multi_modal_data": {"video": []}}, "'video' is not read here; give it to chat"),
        ({"prompt": "w1", "mm_processor_kwargs": {}}, "and no mm_processor_kwargs"),
        ({"multi_modal_data": {}}, "a prompt needs a text as prompt"),
    ],
)
def test_prompts_of_vllm_that_cannot_be_read_are_refused(llm: LLM, prompt: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, **FIELDS)


def test_several_images_and_several_texts_of_a_prompt(llm: LLM, vision_model: tuple[str, Any]) -> None:
    first, second = picture(90, 200, 2), picture(150, 60, 3)
    messages = says({"type": "image", "image": first}, text("w7"), {"type": "image", "image": second})

    outs = llm.chat([messages], n=2, **FIELDS)
    streamed = "".join(out.text for out in llm.chat(messages, **FIELDS))

    assert {out.text for out in outs} | {streamed} == {expected(vision_model[1], [1, first, 7, second, 2])}


def test_text_beside_images_is_not_changed_by_them(llm: LLM, vision_model: tuple[str, Any]) -> None:
    image = picture(120, 90, 4)
    plain = [{"role": "user", "content": "w5 w6"}]

    outs = llm.chat([plain, says({"type": "image", "image": image})], **FIELDS)

    assert outs[0].text == expected(vision_model[1], [1, 5, 6, 2])
    assert outs[1].text == expected(vision_model[1], [1, image, 2])


def test_a_damaged_image_ends_its_request_only(llm: LLM, vision_model: tuple[str, Any]) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((300, 300), 60).save(buffer, "PNG")
    broken = buffer.getvalue()[: len(buffer.getvalue()) // 2]
    image = picture(84, 84, 5)

    outs = llm.chat([says({"type": "image", "image": broken}), says({"type": "image", "image": image})], **FIELDS)

    assert outs[0].error == "the PNG image is damaged or incomplete; send it again"
    assert outs[1].text == expected(vision_model[1], [1, image, 2])


def test_preempted_requests_with_images_get_the_same_texts(vision_model: tuple[str, Any]) -> None:
    images = [picture(84, 112 + 28 * number, 10 + number) for number in range(4)]
    chats = [says({"type": "image", "image": image}, text("w9")) for image in images]
    options: dict[str, Any] = {"device": "cpu", "embed_cache_gb": 0.01}

    with LLM(vision_model[0], max_total_token_num=130, **options) as small:
        small.generate([[5]] * 40, **FIELDS | {"max_new_tokens": 2})  # from now on short outputs are expected
        outs = small.chat(chats, **FIELDS | {"max_new_tokens": 24})
        num_preemptions = small._scheduler.num_preemptions

    wanted = [expected(vision_model[1], [1, image, 9, 2], 24) for image in images]
    assert [out.text for out in outs] == wanted
    assert num_preemptions > 0


def test_what_is_no_image_is_refused(llm: LLM, tmp_path: Path) -> None:
    def refusal(part: dict[str, Any]) -> str:
        with pytest.raises(InvalidRequestError) as error:
            llm.chat([says(part)], **FIELDS)
        return str(error.value)

    assert "cannot be read: No such file" in refusal({"type": "image", "image": str(tmp_path / "none.png")})
    assert "not int" in refusal({"type": "image", "image": 5})
    assert "needs its content in image_url" in refusal({"type": "image_url"})
    assert "its host has no public address" in refusal({"type": "image_url", "image_url": "https://127.0.0.1/a.png"})
    prompt = llm.chat_prompts(says({"type": "image", "image": picture(60, 60)}))
    with pytest.raises(InvalidRequestError, match="a beam search takes no images"):
        llm.beam_search(prompt)


def test_videos_that_are_too_slow_are_refused(llm: LLM) -> None:
    frames = [picture(84, 84, number) for number in range(16)]
    for fps in (0, -1, 1e-9, float("nan"), float("inf"), "fast"):
        with pytest.raises(InvalidRequestError, match=r"the fps of a video is .*; it must be a number from 0.01"):
            llm.chat([says({"type": "video", "video": frames, "fps": fps})], **FIELDS)
    with pytest.raises(InvalidRequestError, match="its videos are so slow"):
        llm.chat([says({"type": "video", "video": frames, "fps": 0.01})], **FIELDS)


def test_an_llm_without_a_vision_tower_refuses_images(vision_model: tuple[str, Any]) -> None:
    options: dict[str, Any] = {"device": "cpu", "max_total_token_num": 500}
    with LLM(vision_model[0], limit_mm_per_prompt={"image": 0}, **options) as llm, pytest.raises(TextOnlyError):
        llm.chat([says({"type": "image", "image": picture(60, 60)})], **FIELDS)


def test_a_video_is_a_list_of_frames_or_an_animation(llm: LLM, tmp_path: Path) -> None:
    frames = [picture(84, 112, number) for number in range(4)]
    path = tmp_path / "wave.png"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=500)
    forms: list[dict[str, Any]] = [
        {"type": "video", "video": frames, "fps": 2},
        {"type": "video", "video": str(path)},
        {"type": "video_url", "video_url": {"url": f"file://{path}"}},
    ]

    outs = llm.chat([says(form, text("w40")) for form in forms], **FIELDS)

    assert len({out.text for out in outs}) == 1
    assert [out.prompt_ids for out in outs] == [[1, START, *[PAD] * 24, END, 40, 2]] * 3


def test_prompts_whose_tokens_see_later_ones_share_no_kv(tmp_path: Path) -> None:
    """PaliGemma reads the image and the whole prompt at once, so a longer prompt changes the KV of its beginning."""
    from test.vision_families import save_family  # here, because it imports many models of transformers

    save_family(tmp_path, "paligemma")
    options: dict[str, Any] = {"device": "cpu", "max_total_token_num": 500, "embed_cache_gb": 0.01}
    image = {"type": "image", "image": picture(32, 32, 1)}
    chats = [says(image, text(" ".join(f"w{5 + n}" for n in range(count)))) for count in (9, 30)]

    with LLM(str(tmp_path), **options) as llm:
        after_each_other = [llm.generate(llm.chat_prompts(chat), **FIELDS, logprobs=1)[0] for chat in chats]
        prompts = [len(out.prompt_ids) for out in after_each_other]
    with LLM(str(tmp_path), **options) as llm:
        (alone,) = llm.generate(llm.chat_prompts(chats[1]), **FIELDS, logprobs=1)

    assert after_each_other[1].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert prompts[1] > prompts[0] > 9
