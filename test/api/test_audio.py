"""Sounds through a real server on a CPU. The oracle is transformers."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from lightserve import LLM
from lightserve.media.audio.compressed import as_wav
from lightserve.media.audio.split import parts_of
from lightserve.media.audio.wav import decode
from test.api.image_chats import NEW_TOKENS, ask
from test.api.server import ServerProcess, running_server
from test.audio_model import SECONDS, greedy, save_audio_model
from test.media.audio.sounds import Samples, compressed, tone, wav

Served = tuple[str, Any, ServerProcess]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, model = save_audio_model(tmp_path_factory.mktemp("audio"))
    flags = ("--model_dir", folder, "--device", "cpu", "--max_total_token_num", "2000", "--embed_cache_gb", "0.01")
    limits = ("--limit_mm_per_prompt", "audio=3", "--max_audio_mb", "1", "--max_audio_seconds", "9")
    names = ("--served-model-name", "any")
    with running_server(tmp_path_factory.mktemp("server") / "log", *flags, *limits, *names) as server:
        yield folder, model, server


def encoded(file: bytes) -> str:
    return base64.b64encode(file).decode()


def part_of(file: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": encoded(file), "format": "wav"}}


def chat(*parts: str | bytes | dict[str, Any]) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": each} if isinstance(each, str) else part_of(each) if isinstance(each, bytes) else each
        for each in parts
    ]
    return [{"role": "user", "content": content}]


def test_text_after_sounds_is_that_of_transformers(served: Served) -> None:
    _, model, server = served
    first, second = tone(1.2, seed=1), tone(0.4, seed=2)

    text, usage = ask(server, chat("w5", wav(first), "w7", wav(second), "w12"))

    assert text == greedy(model, [1, 5, first, 7, second, 12, 2], NEW_TOKENS)
    assert usage["prompt_tokens_details"]["audio_tokens"] == 30 + 10
    assert usage["prompt_tokens"] == 30 + 10 + 9


def test_another_rate_and_two_channels_give_the_same_number_of_tokens(served: Served) -> None:
    server = served[2]
    stereo = tone(1.0, 44_100).repeat(2).reshape(-1, 2)

    _, usage = ask(server, chat(wav(stereo, 44_100, 24), "w3"))

    assert usage["prompt_tokens_details"]["audio_tokens"] == 25


def test_the_same_sound_is_taken_from_the_cache(served: Served) -> None:
    server, file = served[2], wav(tone(1.0, seed=3))
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encoded(file)}"}}

    _, first = ask(server, chat("w5", file, "w9"))
    _, again = ask(server, chat("w5", url, "w10"))

    assert again["prompt_tokens_details"]["cached_tokens"] == first["prompt_tokens"] - 2


def test_the_openai_client_streams_the_same_text(served: Served) -> None:
    _, model, server = served
    samples = tone(0.8, seed=4)
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        create: Any = client.chat.completions.create
        stream = create(
            model="any",
            messages=chat("w5", wav(samples)),
            max_tokens=NEW_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert text == greedy(model, [1, 5, samples, 2], NEW_TOKENS)


def test_responses_take_sounds_too(served: Served) -> None:
    _, model, server = served
    samples = tone(0.5, seed=11)
    content = [part_of(wav(samples)), {"type": "input_text", "text": "w8"}]
    fields = {"max_output_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "store": False}

    status, response = server.post("/v1/responses", {"input": [{"role": "user", "content": content}], **fields})

    assert status == 200, response
    assert response["output"][0]["content"][0]["text"] == greedy(model, [1, samples, 8, 2], NEW_TOKENS)


def test_beams_share_a_sound(served: Served) -> None:
    server = served[2]
    body = {"messages": chat(wav(tone(0.5, seed=12))), "max_tokens": 3, "use_beam_search": True, "n": 2}

    status, response = server.post("/v1/chat/completions", {**body, "ignore_eos": True})

    assert status == 200, response
    assert len({choice["message"]["content"] for choice in response["choices"]}) == 2


def refusal(server: ServerProcess, *parts: str | bytes | dict[str, Any]) -> str:
    status, response = server.post("/v1/chat/completions", {"messages": chat(*parts), "max_tokens": 1})
    assert status == 400, response
    message: str = response["error"]["message"]
    return message


def image() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_sounds_that_cannot_be_heard_are_refused_and_end_nothing(served: Served) -> None:
    server = served[2]
    short, whole = wav(tone(0.5)), wav(tone(0.5))
    aac = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "aac"}}

    assert "sound 2 of the request: not a WAV file, nor MP3" in refusal(server, short, b"RIFX" + bytes(99))
    assert "the WAV file is incomplete: 15,900 of its 16,000 bytes" in refusal(server, whole[:-100])
    assert "the format of an input_audio must be one of wav, mp3, flac, ogg, opus" in refusal(server, aac)
    assert "its data is not base64" in refusal(server, {"type": "audio_url", "audio_url": "data:audio/wav;base64,?"})
    assert "must have an input_audio with base64" in refusal(server, {"type": "input_audio", "input_audio": "AAAA"})
    assert "must have an audio_url with a string" in refusal(server, {"type": "audio_url", "audio_url": {}})
    assert "it has 3.2 s; the model hears 3 s at once" in refusal(server, wav(tone(3.2)))
    assert "too short to have a token" in refusal(server, wav(tone(0.01)))
    assert "it has more than 1 MB (--max_audio_mb)" in refusal(server, wav(tone(0.1)) + bytes(10**6))
    assert "the request has 4 sounds; the limit is 3" in refusal(server, *[short] * 4)
    assert "this model reads no images" in refusal(server, image())
    assert "0 images or sounds" not in refusal(server, "<|AUDIO|>", short)

    ask(server, chat(short, "w4"))


def test_a_new_encoder_hears_the_sound_that_the_dead_one_had(served: Served) -> None:
    _, model, server = served
    (process,) = server.processes()["ls-encoder"]
    os.kill(process.pid, signal.SIGKILL)
    samples = tone(0.6, seed=9)

    text, _ = ask(server, chat("w5", wav(samples)))

    assert text == greedy(model, [1, 5, samples, 2], NEW_TOKENS)


def test_an_llm_without_a_server_hears_too(served: Served) -> None:
    folder, model, _ = served
    samples = tone(0.7, seed=5)
    sounds = [chat("w5", part) for part in ({"type": "audio", "audio": wav(samples)}, part_of(wav(samples)))]

    with LLM(folder, device="cpu", max_total_token_num=2000, embed_cache_gb=0.01) as llm:
        texts = [out.text for out in llm.chat(sounds, max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)]

    assert texts == [greedy(model, [1, 5, samples, 2], NEW_TOKENS)] * 2


UNKNOWN = 0  # what a word of the instruction becomes
INSTRUCTED = [UNKNOWN] * 3  # Transcribe the speech.


def test_the_openai_client_gets_transcriptions(served: Served) -> None:
    _, model, server = served
    samples = tone(1.1, seed=6)
    extra = {"max_completion_tokens": str(NEW_TOKENS)}
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        create = client.audio.transcriptions.create
        file = ("sound.wav", wav(samples))
        whole = create(model="any", file=file, temperature=0, extra_body=extra)
        text = create(model="any", file=file, response_format="text", extra_body=extra)
        named = create(model="any", file=file, language="en", prompt="w9", extra_body=extra)
        events = list(create(model="any", file=file, stream=True, extra_body=extra))

    expected = greedy(model, [1, samples, *INSTRUCTED, 2], NEW_TOKENS)
    assert whole.text == text == expected
    assert named.text == greedy(model, [1, samples, *INSTRUCTED, *[UNKNOWN] * 5, 9, 2], NEW_TOKENS)
    assert whole.usage is not None
    assert whole.usage.model_dump()["input_token_details"]["audio_tokens"] == 27
    assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == expected  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["MP3", "FLAC"])
def test_compressed_sounds_are_transcribed_and_stand_in_chats(served: Served, kind: str) -> None:
    _, model, server = served
    file = compressed(tone(0.9, seed=13), kind)
    samples, _ = decode(as_wav(file, SECONDS))
    part = {"type": "input_audio", "input_audio": {"data": encoded(file), "format": kind.lower()}}

    text, _ = ask(server, chat("w5", part))
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        extra = {"max_completion_tokens": str(NEW_TOKENS)}
        whole = client.audio.transcriptions.create(model="any", file=(f"a.{kind.lower()}", file), extra_body=extra)

    assert text == greedy(model, [1, 5, samples, 2], NEW_TOKENS)
    assert whole.text == greedy(model, [1, samples, *INSTRUCTED, 2], NEW_TOKENS)


def test_a_long_sound_is_transcribed_in_parts(served: Served) -> None:
    _, model, server = served
    samples = tone(5.0, seed=8)
    samples[40_000:43_200] = 0
    first, second = divided(samples)
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        create = client.audio.transcriptions.create
        extra = {"max_completion_tokens": str(NEW_TOKENS)}
        whole = create(model="any", file=wav(samples), extra_body=extra)
        *_, done = create(model="any", file=wav(samples), stream=True, extra_body=extra)

    texts = [greedy(model, [1, part, *INSTRUCTED, 2], NEW_TOKENS) for part in (first, second)]
    assert whole.text == done.text == " ".join(texts)  # type: ignore[union-attr]


def divided(samples: Samples) -> list[Samples]:
    return [decode(part)[0] for part in parts_of(wav(samples), SECONDS)]


def test_transcriptions_that_cannot_be_made_are_refused(served: Served) -> None:
    server = served[2]

    def refused(file: bytes, **fields: str) -> str:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(APIStatusError) as info:
            client.audio.transcriptions.create(model="any", file=("a.wav", file), extra_body=fields)
        assert info.value.status_code in (400, 413)
        return info.value.message

    assert "file: not a WAV file" in refused(b"RIFX" + bytes(99))
    assert "file: the WAV file is incomplete" in refused(wav(tone(0.5))[:-100])
    assert "it has 10 s; the limit is 9 (--max_audio_seconds)" in refused(wav(tone(10.0)))
    assert "the file is larger than 1000000 bytes (--max_audio_mb)" in refused(bytes(10**6 + 1))
    assert "response_format" in refused(wav(tone(0.5)), response_format="srt")
    assert "temperature" in refused(wav(tone(0.5)), temperature="warm")
    assert "language" in refused(wav(tone(0.5)), language="English please")
    assert "is not supported yet" in refused(wav(tone(0.5)), **{"include[]": "logprobs"})
