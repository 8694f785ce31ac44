"""The offline LLM, on the real default model."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from lightserve.errors import InvalidRequestError, ModelFilesError, PromptTooLongError, ServerError
from lightserve.messages.params import FinishReason, GenerationParams
from lightserve.offline.llm import LLM

GREEDY = GenerationParams.of(max_new_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    # expanded weights: packed ones round their inputs, which turns a last bit into another code
    return LLM(
        max_total_token_num=2000,
        max_req_total_len=1000,
        running_max_req_size=6,
        batch_max_tokens=64,
        quantization="none",
    )


def test_a_stop_token_beyond_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"stop_token_ids must be integers in 0\.\.49151"):
        llm.generate("Hello", GenerationParams.of(stop_token_ids=(49152,), min_new_tokens=2))


@pytest.fixture(autouse=True)
def _all_rows_come_back(llm: LLM) -> Iterator[None]:
    yield
    llm.generate([1], GenerationParams.of(max_new_tokens=1))  # its step frees the rows of aborted requests
    assert llm.worker.model.req_manager.num_free == 5  # the next step frees its own row


def test_a_prompt_has_the_same_text_alone_and_among_others(llm: LLM) -> None:
    prompts = [f"Tell me about the number {i} and " * (i % 4 + 1) for i in range(9)]

    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]

    assert [g.token_ids for g in together] == [g.token_ids for g in alone]


def test_a_seed_fixes_the_text_in_any_batch(llm: LLM) -> None:
    seeded = GenerationParams.of(max_new_tokens=12, temperature=0.9, top_p=0.95, seed=1234)
    other = GenerationParams.of(max_new_tokens=12, temperature=1.0)

    alone = llm.generate("Once upon a time", seeded)[0].text
    among = llm.generate(["Once upon a time", "Hello", "The sky is"], [seeded, other, other])[0].text
    another = llm.generate("Once upon a time", GenerationParams.of(max_new_tokens=12, temperature=0.9, seed=99))[0].text

    assert among == alone
    assert another != alone


def test_streamed_pieces_add_up_to_the_text(llm: LLM) -> None:
    prompts = ["日本語で数を数える: 一、二、", "😀 😃 😄 😁", "Liberté, égalité,"]
    params = GenerationParams.of(max_new_tokens=30, temperature=0, ignore_eos=True)

    outs = list(llm.generate_stream(prompts, params))

    for i, prompt in enumerate(prompts):
        pieces = [out for out in outs if out.index == i]
        whole = llm.tokenizer.decode([out.token_id for out in pieces if out.token_id is not None])
        assert "".join(out.text for out in pieces) == whole, prompt
        assert all("\ufffd" not in out.text for out in pieces[:-1])
        assert [out.finish_reason for out in pieces] == [None] * 29 + [FinishReason.LENGTH]


def test_open_streams_do_not_disturb_each_other(llm: LLM) -> None:
    prompts = ["The capital of France is", "Water boils at", "1, 2, 3, 4,"]
    alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]

    first, second = llm.stream(prompts[0], GREEDY), llm.stream(prompts[1], GREEDY)
    together = [(a.token_id, b.token_id) for a, b in zip(first, second, strict=True)]
    open_stream = llm.stream(prompts[2], GREEDY)
    begun = next(open_stream).token_id
    between = llm.generate(prompts[0], GREEDY)[0].token_ids
    rest = [out.token_id for out in open_stream]

    assert [list(ids) for ids in zip(*together, strict=True)] == alone[:2]
    assert between == alone[0]
    assert [begun, *rest] == alone[2]


def test_a_step_that_fails_ends_every_stream_and_the_next_request_is_served(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = llm.stream("Water boils at", GREEDY)
    next(other)
    with monkeypatch.context() as broken:
        broken.setattr(llm.worker._runner, "run", lambda *step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate("Hello", GREEDY)

    with pytest.raises(ServerError, match="dropped"):
        list(other)

    assert llm.generate("The capital of France is", GREEDY)[0].text.startswith(" Paris")


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    full = llm.generate("1, 2, 3, 4,", GenerationParams.of(max_new_tokens=20, temperature=0))[0]
    assert " 7" in full.text

    params = GenerationParams.of(max_new_tokens=20, temperature=0, stop=" 7")  # one needs no tuple
    stopped = llm.generate("1, 2, 3, 4,", params)[0]

    assert stopped.text == full.text[: full.text.index(" 7")]
    assert stopped.finish_reason is FinishReason.STOP
    assert len(stopped.token_ids) < len(full.token_ids)


def test_a_stop_token_ends_the_text(llm: LLM) -> None:
    full = llm.generate("The capital of France is", GREEDY)[0]

    stop = full.token_ids[-1]
    params = GenerationParams.of(max_new_tokens=12, temperature=0, stop_token_ids=(stop,))
    stopped = llm.generate("The capital of France is", params)[0]

    assert stopped.token_ids == full.token_ids[: full.token_ids.index(stop) + 1]
    assert stopped.finish_reason is FinishReason.STOP


def test_min_new_tokens_keeps_the_model_from_ending(llm: LLM) -> None:
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    ids = llm.tokenizer.encode(prompt, add_special_tokens=False)
    short = llm.generate([ids], GenerationParams.of(max_new_tokens=40, temperature=0))[0]
    assert short.finish_reason is FinishReason.STOP

    params = GenerationParams.of(max_new_tokens=40, min_new_tokens=20, temperature=0)
    longer = llm.generate([ids], params)[0]

    assert len(short.token_ids) < 20 <= len(longer.token_ids)


def test_a_repetition_penalty_breaks_a_loop(llm: LLM) -> None:
    prompt = "the cat the cat the cat the cat the cat the cat"
    loop = llm.generate(prompt, GenerationParams.of(max_new_tokens=12, temperature=0))[0].text

    free = llm.generate(prompt, GenerationParams.of(max_new_tokens=12, temperature=0, repetition_penalty=1.8))[0].text

    assert loop.count("cat") > 3
    assert free.count("cat") < loop.count("cat")


def test_logprobs_belong_to_the_sampled_tokens(llm: LLM) -> None:
    params = GenerationParams.of(max_new_tokens=12, temperature=0, logprobs=2)

    without, requested = llm.generate(["The capital of France is"] * 2, [GREEDY, params])

    assert not without.logprobs
    assert len(requested.logprobs) == len(requested.token_ids)
    assert all(-10 < logprob <= 0 for logprob in requested.logprobs)
    assert requested.logprobs[0] == pytest.approx(-0.5, abs=0.5)  # " Paris" is likely, not certain
    assert [top[0] for top in requested.top_logprobs] == list(zip(requested.token_ids, requested.logprobs, strict=True))
    assert all(len(top) == 2 and top[0][1] >= top[1][1] for top in requested.top_logprobs)


def question(country: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is the capital of {country}?"}]


def test_a_list_of_conversations_gives_the_answer_of_each(llm: LLM) -> None:
    alone = ["".join(out.text for out in llm.chat(question(name), GREEDY)) for name in ("Japan", "France")]

    together = llm.chat([question("Japan"), question("France")], GREEDY)

    assert [generation.text for generation in together] == alone
    assert [len(one.text) > 0 for one in llm.chat([question("Japan")], [GREEDY])] == [True]
    assert "Tokyo" in alone[0]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hi",
        {"role": "user", "content": "Hi"},
        [{"content": "Hi"}],
        [5],
        [["Hi"]],
        [question("Japan"), {"role": "user", "content": "Hi"}],
        [*question("Japan"), question("Japan")],
        [question("Japan"), []],
    ],
    ids=str,
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^messages: .* is no conversation; a conversation is a list"):
        llm.chat(messages, GREEDY)


def test_a_closed_stream_frees_its_memory(llm: LLM) -> None:
    stream = llm.stream(["Hello", "The sky is", "A long " * 60], GenerationParams.of(max_new_tokens=50, temperature=0))
    next(stream)

    stream.close()  # type: ignore[attr-defined]

    assert llm._scheduler.only_group.pool.used == 0


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", InvalidRequestError, "empty"),
        ([5, 49152], InvalidRequestError, r"0\.\.49151"),
        ([5, -1], InvalidRequestError, r"0\.\.49151"),
        ([[5.5]], InvalidRequestError, "must be integers"),
        ("word " * 1500, PromptTooLongError, "1501 tokens; the limit is 999"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_next_one_served(
    llm: LLM, prompt: str | list[int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate([prompt], GREEDY)

    assert llm.generate("The capital of France is", GREEDY)[0].text.startswith(" Paris")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"top_k": 2**31},
        {"min_p": 2.0},
        {"typical_p": 0.0},
        {"typical_p": 1.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": float("nan")},
        {"min_new_tokens": 17},
        {"stop": ("",)},
        {"stop": (5,)},
        {"stop_token_ids": (1.5,)},
        {"max_new_tokens": 2.5},
        {"temperature": "hot"},
        {"seed": 2**63},
        {"logit_bias": {5: 100.5}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"bad_words_ids": ((),)},
        {"bad_words_ids": ((-1,),)},
        {"bad_words_ids": ((1,) * 65,)},
        {"bad_words_ids": ((1,),) * 1025},
        {"allowed_token_ids": ()},
        {"allowed_token_ids": (-3,)},
        {"allowed_token_ids": (3,) * 16385},
        {"logprobs": -1},
        {"logprobs": True},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    name = next(iter(wrong))

    with pytest.raises(InvalidRequestError, match=name) as refused:
        GenerationParams.of(**wrong)

    assert refused.value.param == name
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_tokens", "did you mean max_new_tokens?"), ("temprature", "did you mean temperature?"), ("xyzzy", "known: ")],
)
def test_an_unknown_parameter_is_refused_with_the_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(f"{name}: there is no such parameter; {hint}")):
        GenerationParams.of(**{name: 3})


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_token", "did you mean max_tokens?"), ("guided_json", "known: max_tokens, n, json_schema, regex, choice, ")],
)
def test_a_parameter_of_nobody_is_refused_with_a_name_of_the_page(llm: LLM, name: str, hint: str) -> None:
    fields: dict[str, Any] = {name: 3}

    with pytest.raises(InvalidRequestError, match=re.escape(f"{name}: there is no such parameter; {hint}")):
        llm.generate("a", **fields)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model_dir": "/no/such/folder"}, ModelFilesError, "/no/such/folder"),
        ({"max_req_total_len": 9000}, ServerError, "supports 8192"),
        ({"data_type": "float8"}, ServerError, "float32, float16, bfloat16"),
        ({"kv_dtype": "int4"}, ServerError, "kv_dtype='int4': must be one of auto, none, fp8, int8"),
        ({"device": "tpu"}, ServerError, "'tpu' is not supported"),
        ({"tp": 2}, ServerError, "do not divide among tp=2 ranks"),
        ({"running_max_req_size": 0}, ServerError, "at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused_before_weights_load(
    options: dict[str, object], error: type[Exception], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=message):
        LLM(**options)  # type: ignore[arg-type]

    assert "weights" not in capsys.readouterr().err


def test_plain_names_say_what_the_text_must_be(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
    prompts = ["Tokyo is a", "I am"]

    choices = llm.generate(prompts, choice=["city", "river"], max_tokens=8, temperature=0)
    numbers = llm.generate(prompts, regex="[0-9]{3}", max_tokens=8)
    objects = llm.chat([[{"role": "user", "content": "Hi"}]], json_schema=schema, max_tokens=40, temperature=0)

    assert {generation.text for generation in choices} <= {"city", "river"}
    assert all(re.fullmatch("[0-9]{3}", generation.text) for generation in numbers)
    assert set(json.loads(objects[0].text)) == {"age"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 3, "max_new_tokens": 3}, "the same"),
        ({"regex": "a", "choice": ["a"]}, "exclude each other"),
        ({"regex": ""}, "no regular expression"),
        ({"choice": "ab"}, "no list of texts"),
        ({"json_schema": 7}, "neither a dict nor a pydantic model"),
        ({"n": 0}, "from 1 to"),
    ],
)
def test_a_wrong_plain_parameter_is_named(llm: LLM, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate("Hello", **fields)


def test_a_prompt_may_have_several_texts(llm: LLM) -> None:
    sampled: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "seed": 7}

    several = llm.generate(["Once upon a time", "The sky"], n=3, **sampled)
    first, second = llm.generate(["Once upon a time", "The sky"], **sampled)

    assert [generation.prompt_ids for generation in several] == [first.prompt_ids] * 3 + [second.prompt_ids] * 3
    assert (several[0].text, several[3].text) == (first.text, second.text)
    assert len({generation.text for generation in several[:3]}) == 3


def test_a_closed_llm_frees_its_model_and_says_that_it_is_closed() -> None:
    with LLM(load_format="dummy", max_total_token_num=200, max_req_total_len=100) as llm:
        model = weakref.ref(llm.worker.model)
        assert llm.generate([1, 2], max_tokens=2)[0].finish_reason is not None
    assert model() is None
    with pytest.raises(ServerError, match="closed"):
        llm.generate([1, 2])
    llm.close()
