"""Chat templates that try to take much time or memory. Each has one line; ``DOUBLED`` makes values of 2**60 items."""

from __future__ import annotations

LOOPS = "{% for i in range(100000) %}{% for j in range(100000) %}"
ENDS = "{% endfor %}{% endfor %}"
DOUBLED = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
LONG = "{% set long = 'x' * 1000000 %}"


def repeated(expression: str) -> str:
    return "{% set found = [" + ", ".join([expression] * 100) + "] %}"


STEPS = (
    LOOPS + ENDS,
    LOOPS + "{% set x = 1 %}" + ENDS,
    "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n > 0 %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% set c = cycler(1, 2) %}" + LOOPS + "{% set x = c.next() %}" + ENDS,
    "{% for i in range(9) recursive %}{{ loop(range(9)) if loop.depth0 < 60 }}{% endfor %}",
    "{% set many = [range(100000)|list] * 100000 %}{{ many|map('sum')|sum }}",
    "{{ [1]|slice(3000000000)|list|length }}",
    "{% for char in 'ab' * 1000000 %}{% set x = loop.last %}{% endfor %}",
)
LARGE_VALUES = (
    "{{ ('a' * 3000000000)|length }}",
    "{{ ([1] * 3000000000)|length }}",
    "{{ (3000000000 * 'é')|length }}",
    "{{ ('a'|safe * 3000000000)|length }}",
    "{{ 2 ** 1000000000 }}",
    "{% set ns = namespace(x=3) %}{% for i in range(100) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%.1000000000f' % 1 }}",
    "{{ '%(a)1000000000s' % {'a': 1} }}",
    "{{ ('%(a)s' * 10000) % {'a': 'x' * 10000} }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ ('{:>1000000000}'|safe).format(1) }}",
    "{{ '{:>{}}'.format(1, 1000000000) }}",
    "{{ ('{0}' * 10000).format('x' * 10000) }}",
    "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "{{ ('{:>1000000000}'|attr('format'))(1) }}",
    "{{ 'a'|center(3000000000)|length }}",
    "{{ 'a'.center(3000000000)|length }}",
    "{{ ('a'|attr('center'))(3000000000)|length }}",
    "{{ 'a'.ljust(3000000000)|length }}",
    "{{ '1'.zfill(3000000000)|length }}",
    "{{ '\t'.expandtabs(3000000000)|length }}",
    LONG + "{{ long.join(range(10000)|map('string')|list)|length }}",
    LONG + "{{ range(10000)|join(long)|length }}",
    LONG + "{{ long.join(range(10000)|map('string')) }}",
    LONG + "{{ ([long] * 1000)|join|length }}",
    LONG + "{{ long.replace('x', long)|length }}",
    LONG + "{{ long.replace('', long)|length }}",
    LONG + "{{ long|replace('x', long)|length }}",
    "{{ ('\n' * 10000)|indent(10000, true, true)|length }}",
    "{{ [1]|batch(3000000000, 0)|list|length }}",
    "{{ 1.5|round(1000000000, 'floor') }}",
    "{{ ([[1] * 10000] * 10000)|sum(start=[])|length }}",
    "{{ ('a ' * 1000000).split()|length }}",
    "{{ ('a ' * 1000000).split(' ')|length }}",
    "{{ ('a ' * 1000000).rsplit(sep=' ')|length }}",
    "{{ ('a\n' * 1000000).splitlines()|length }}",
    "{{ ('a' * 1000000)|list|length }}",
    "{{ ('a ' * 1000000)|title|length }}",
    "{{ ('a ' * 1000000)|wordcount }}",
    "{{ ('ba' * 1000000)|sort|length }}",
    "{{ ('&' * 1000000)|e|length }}",
    "{{ ('é' * 1000000)|urlencode|length }}",
    "{{ lipsum(n=1000000000) }}",
    "{{ 'a'.encode('utf-8') }}",
    "{{ (1).to_bytes(3000000000, 'big')|length }}",
    "{{ 'aaa'.translate({97: 'x' * 1000000})|length }}",
    "{{ [1]|tojson(indent=3000000000) }}",
    LONG + "{{ ([1] * 10000)|tojson(separators=[long, ':'])|length }}",
    "{{ strftime_now('%d' * 1000000)|length }}",
    "{{ -1000000000|map('count a step')|list }}{{ ('a' * 3000000000)|length }}",
)
MANY_VALUES = (
    LONG + repeated("long[1:]"),
    LONG + repeated("long.upper()"),
    LONG + repeated("long|upper"),
    LONG + repeated("long ~ 1"),
    LONG + repeated("long + 'a'"),
    LONG + repeated("long * 1 + ''"),
    "{% set many = range(10000)|list %}" + repeated("many.copy()") + repeated("many[1:]"),
    LONG + "{% set y %}{% for i in range(1000) %}{{ long }}{% endfor %}{% endset %}",
    LONG + "{% filter upper %}{% for i in range(1000) %}{{ long }}{% endfor %}{% endfilter %}",
    "{% set y %}" + LOOPS + "x" * 10000 + ENDS + "{% endset %}",
    "{% macro m() %}" + "x" * 10000 + "{% endmacro %}{% for i in range(100000) %}{% set x = m() %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
)
NESTED_VALUES = (
    DOUBLED + "{{ ns.x }}",
    DOUBLED + "{{ ns }}",
    DOUBLED + "{{ [ns]|string }}",
    DOUBLED + "{{ ns.x|string|length }}",
    DOUBLED + "{{ ns.x|tojson|length }}",
    DOUBLED + "{{ ns.x|tojson(indent=2)|length }}",
    DOUBLED + "{{ (ns.x ~ '')|length }}",
    DOUBLED + "{{ '%s' % [ns.x] }}",
    DOUBLED + "{{ '{}'.format(ns.x) }}",
    DOUBLED + "{{ ns.x == ns.y }}",
    DOUBLED + "{{ 1 < 2 == ns.x == ns.y }}{{ ns.x in [ns.y] }}",
    DOUBLED + "{{ ns.x is eq ns.y }}",
    DOUBLED + "{{ [ns.x]|select('eq', ns.y)|list }}",
    DOUBLED + "{{ [ns.x].index(ns.y) }}",
    DOUBLED + "{% for z in [ns.x, ns.y] %}{% set a = loop.changed(z) %}{% endfor %}",
    DOUBLED + "{{ [ns.x, ns.y]|sort|length }}",
    DOUBLED + "{{ [ns.x, ns.y]|max }}",
    DOUBLED + "{{ [ns.x]|join }}",
    "{% set ns = namespace(x=(1, 2)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
    "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=1) %}{% set ns.x = [ns] %}{{ ns }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% block b %}{{ self.b() }}{% endblock %}",
)
HOSTILE = (*STEPS, *LARGE_VALUES, *MANY_VALUES, *NESTED_VALUES)
# refused when the model is loaded
NOT_COMPILED = {
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "RecursionError|nested",
    "{% for a in b %}" * 30 + "{% endfor %}" * 30: "nested",
    "x" * (2**20 + 1): "1,048,577 characters; the limit is 1,048,576",
    "{% autoescape true %}{{ '&' }}{% endautoescape %}": "autoescape is not available",
    "{{ 'a'|urlize }}": "No filter named 'urlize'",
    "{{ " + "9" * 10000 + " }}": "ValueError",
}
