"""Chat templates come with a model's files: a hostile one is refused within its limits, an ordinary one works."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lightserve.errors import InvalidRequestError, TemplateLimitError
from lightserve.model_files.template import guards
from lightserve.model_files.template.budget import IN_THREAD, RenderLimits
from lightserve.model_files.template.chat_template import ChatTemplate
from lightserve.model_files.template.environment import TemplateEnvironment
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from test.model_files.hostile_templates import HOSTILE, NOT_COMPILED, STEPS
from test.traced_memory import peak_bytes

MESSAGES = [{"role": "user", "content": "Hi <there>"}, {"role": "assistant", "content": "Hello\nworld", "n": [3, 1, 2]}]
LIMITS = RenderLimits(steps=2**14, size=2**22)


def shortened(text: str) -> str:
    return text[-50:]


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, SpecialTokens())


@pytest.mark.parametrize("text", HOSTILE, ids=shortened)
def test_a_hostile_template_is_refused_within_its_limits(text: str) -> None:
    compiled = template(text)

    def render() -> None:
        with pytest.raises(InvalidRequestError):
            compiled.render(LIMITS, messages=MESSAGES)

    assert peak_bytes(render) < 2 * LIMITS.size


@pytest.mark.parametrize(("text", "reason"), NOT_COMPILED.items(), ids=shortened)
def test_a_template_that_cannot_be_compiled_is_an_error_of_the_template(text: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        template(text)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (RenderLimits(steps=4096, size=2**30), "more than 4,096 steps"),
        (RenderLimits(steps=2**60, size=2**30, seconds=0.0), "longer than 0 s"),
    ],
)
def test_steps_and_seconds_are_limited(limits: RenderLimits, reason: str) -> None:
    with pytest.raises(TemplateLimitError, match=reason):
        template(STEPS[0]).render(limits)


def test_a_limit_is_named_with_its_number() -> None:
    with pytest.raises(TemplateLimitError, match="takes more than 1,000 bytes to render these messages"):
        template("{% for i in range(101) %}{{ text }}{% endfor %}").render(RenderLimits(2**14, 1000), text="x" * 10)


def test_a_long_chat_is_far_from_the_limits() -> None:
    text = (
        "{% for message in messages %}{% set content = message.content|trim %}"
        "{{ '<' + message.role + '>' + content.split('</think>')[-1] + '\n' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "x" * 8000} for _ in range(2048)]

    assert len(template(text).render(IN_THREAD._replace(size=IN_THREAD.size // 2), messages=messages)) > 2048 * 8000


# expressions and blocks of ordinary templates; the oracle is Jinja's own sandbox
ORDINARY = (
    "{{ 1 + 2 * 3 - 4 / 2 // 1 % 3 ** 2 }}{{ 'a' + 'b' ~ 1 ~ none ~ [1] }}{{ [1] + [2] }}{{ 'ab' * 2 }}",
    "{{ [0] * 2 }}",
    "{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ x == y }}{{ x != y }}{{ messages == messages }}",
    "{{ 'user' in messages[0].values() }}",
    "{{ [1] in [[1]] }}{{ [1] not in [[1]] }}{{ 'role' in messages[0] }}{{ (1, 2) == (1, 2) }}",
    "{{ {(1, 2): 3}[(1, 2)] }}",
    "{{ messages[1].content[2:4] }}{{ messages[::-1][0].role }}{{ messages[-1:] }}",
    "{{ '%s is %5.2f' % ('pi', 3.14159) }}{{ '{} {a:>5}'.format(1, a=2) }}{{ '%(k)s' % {'k': 1} }}{{ 7 % 3 }}",
    "{{ 'a,b'.split(',') }}{{ ' a b '.split() }}{{ 'a\nb'.splitlines() }}{{ '-'.join(['a', 'b']) }}",
    "{{ 'abc'.replace('b', 'xx') }}{{ 'a'.center(5) }}|{{ 'a'.ljust(3) }}|{{ '7'.zfill(3) }}",
    "{{ 'a\tb'.expandtabs(2) }}",
    "{{ messages[0].get('role') }}{{ messages[0].items()|list }}{{ [1, 2].index(2) }}{{ [1, 1].count(1) }}",
    (
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% else %}"
        "none{% endfor %}"
    ),
    (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.previtem.role }}{% break %}"
        "{% endfor %}"
    ),
    "{% for i in [[1, [2]], 3] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}",
    (
        "{% for k, v in messages[0]|items %}{{ k }}={{ v }};{% endfor %}{% for a, b in [(1, 2)] %}"
        "{{ a }}{{ b }}{% endfor %}"
    ),
    (
        "{% macro m(a, b=2) %}<{{ a }}{{ b }}{{ caller() if caller }}>{% endmacro %}{{ m(1) }}{% call m(3) %}"
        "x{% endcall %}"
    ),
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    (
        "{% set text %}a{{ 1 }}{% endset %}{{ text }}{% filter upper %}a{{ 'b' }}{% endfilter %}"
        "{% set c = cycler('a', 'b') %}"
    ),
    "{{ messages|map(attribute='role')|list }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "{{ messages|rejectattr('role', 'in', ['user'])|map(attribute='n')|first|sort|join(', ') }}",
    "{{ none|default(1) }}",
    "{{ [3, 1, 2]|sum }}{{ [3, 1]|min }}{{ [3, 1]|max }}{{ [1, 1]|unique|list }}{{ [1, 2, 3]|batch(2)|list }}",
    "{{ [1, 2, 3]|slice(2)|list }}{{ messages|groupby('role')|length }}{{ {'b': 1, 'a': 2}|dictsort }}",
    "{{ 'ab'|reverse }}",
    "{{ ' a '|trim }}{{ 'a b'|title }}{{ 'A'|lower }}{{ 'a'|upper }}{{ 'ab c'|wordcount }}{{ 'a\nb'|indent(2) }}",
    "{{ '<'|e }}{{ '<'|safe }}{{ 'abc def'|truncate(5, true) }}{{ 2.567|round(1) }}{{ -1|abs }}{{ '5'|int }}",
    "{{ '5'|float }}",
    "{{ messages|last }}{{ 'a%s'|format(1) }}{{ [1]|string }}{{ 'a b'|urlencode }}{{ 'a'|center(5) }}",
    "{{ messages|length }}",
    "{{ none }}{{ undefined_name }}{{ undefined_name is defined }}{{ 1 is odd }}{{ 'a' is string }}",
    "{{ [] is mapping }}",
    "{{ [1, 2]|select('gt', 1)|list }}{{ 1 is in [1] }}{{ 1 is ne 2 }}{{ range(3)|list }}{{ dict(a=1) }}",
    "{{ none|map('int')|list }}",
    "{% with a = 1 %}{{ a }}{% endwith %}{% block b %}block{{ x }}{% endblock %}{{ self.b() }}{{ 'a' if x else 'b' }}",
    "{{ 'é漢😀' + 'x' }}{{ not x }}{{ x and y }}{{ x or y }}{{ -x }}{{ 10 ** 3 }}{{ 2 ** -1 }}{{ true * 3 }}",
)


@pytest.mark.parametrize("text", ORDINARY, ids=shortened)
def test_an_ordinary_template_renders_as_in_jinja(text: str) -> None:
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols],
        finalize=lambda value: "" if value is None else value,
    )
    variables: dict[str, Any] = {"messages": MESSAGES, "x": 1, "y": [2]}

    assert template(text).render(**variables) == plain.from_string(text).render(**variables)


def test_every_filter_of_jinja_is_known_to_the_guards() -> None:
    """A new filter of Jinja is walked, but might make a list of what it gets, or a large value: look at it first."""
    known = {*guards.FILTERS, *guards.SHALLOW_FILTERS, *guards.LAZY_FILTERS, *guards.LISTING_FILTERS}
    harmless = {"capitalize", "dictsort", "filesizeformat", "float", "int", "lower", "safe", "string", "tojson"}
    harmless |= {"trim", "truncate", "upper"}

    assert known | harmless | guards.REMOVED_FILTERS == set(ImmutableSandboxedEnvironment().filters)
    assert not guards.REMOVED_FILTERS & set(TemplateEnvironment().filters)


def test_every_method_of_a_text_is_free_guarded_or_refused() -> None:
    refused = {"encode", "maketrans", "translate"}
    methods = {name for name in dir(str) if not name.startswith("_")}

    assert guards.FREE_STRING_METHODS | set(guards.STRING_METHODS) | refused == methods


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{{ 1 }}", "1"), ("{{ 1.5 }}", "1.5"), ("{{ none }}", ""), ("{{ x == 2 }}", "False"), ("text", "text")],
)
def test_numbers_and_constants_cost_nothing(text: str, expected: str) -> None:
    assert template(text).render(RenderLimits(steps=1, size=0), x=1) == expected
