"""How many tokens at the end of a prompt begin the answer."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend, models, pre_tokenizers

from lightserve.model_files.template.budget import ON_EVENT_LOOP
from lightserve.model_files.template.chat_template import ChatTemplate
from lightserve.model_files.template.generation_prompts import MAX_KNOWN, GenerationPrompts
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from lightserve.model_files.tokenizer.tokenizer import Tokenizer

TURNS = "{% for message in messages %}user {{ message.content }} {% endfor %}"
THINKING = TURNS + "{% if add_generation_prompt %}assistant {{ 'think' if thinks else 'no think' }} now{% endif %}"
ALWAYS = TURNS + "assistant"
REFUSES_ONE = "{% if messages | length < 2 %}{{ raise_exception('two') }}{% endif %}" + THINKING


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A token is a word."""
    backend = Backend(models.WordLevel({"unknown": 0}, unk_token="unknown"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, SpecialTokens(), None)


def num_tokens(tokenizer: Tokenizer, text: str, count: int = 1, **variables: Any) -> int:
    template = ChatTemplate(text, SpecialTokens())
    messages = [{"role": "user", "content": "hello there"}] * count
    prompt = template.render(ON_EVENT_LOOP, messages=messages, add_generation_prompt=True, **variables)
    return GenerationPrompts().num_tokens(tokenizer, template, variables, prompt)


def test_it_depends_on_the_variables_of_the_template(tokenizer: Tokenizer) -> None:
    assert num_tokens(tokenizer, THINKING, thinks=True) == 3
    assert num_tokens(tokenizer, THINKING, thinks=False) == 4


def test_a_template_that_adds_nothing_or_refuses_the_short_chat_has_none(tokenizer: Tokenizer) -> None:
    assert num_tokens(tokenizer, ALWAYS) == 0
    assert num_tokens(tokenizer, REFUSES_ONE, count=2) == 0


def test_a_prompt_that_ends_in_another_way_has_none(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(THINKING, SpecialTokens())

    assert GenerationPrompts().num_tokens(tokenizer, template, {}, "user hello assistant") == 0


def test_long_variables_and_many_of_them_take_no_memory(tokenizer: Tokenizer) -> None:
    template, known = ChatTemplate(THINKING, SpecialTokens()), GenerationPrompts()
    for number in range(2 * MAX_KNOWN):
        assert known.num_tokens(tokenizer, template, {"n": number}, "assistant no think now") == 4

    assert known.num_tokens(tokenizer, template, {"text": "x" * 5_000}, "assistant no think now") == 0
    assert len(known._known) == MAX_KNOWN
