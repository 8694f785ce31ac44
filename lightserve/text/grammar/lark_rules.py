"""How deep the rules of a Lark grammar refer to one another."""

from __future__ import annotations

import re

from lightserve.errors import InvalidRequestError
from lightserve.utils.depth import is_deeper

MAX_RULE_DEPTH = 1000  # llguidance recurses along rules, with about 3 kB of stack each
# what is no name: strings, regular expressions, comments. A missing end is none of our business
_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])*/?')
_DEFINITION = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)[^:\n]*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")


def check_rules(lark: str) -> None:
    """Raise InvalidRequestError if rules refer to one another too deeply."""
    rules = _references(lark)
    if is_deeper("start", MAX_RULE_DEPTH, lambda name: rules.get(name, ()), str):
        raise InvalidRequestError(
            f"rules of the grammar refer to one another more than {MAX_RULE_DEPTH} rules deep; simplify it"
        )


def _references(lark: str) -> dict[str, list[str]]:
    """The names in each rule, in their order."""
    text = _TEXTS.sub('""', lark)
    definitions = list(_DEFINITION.finditer(text))
    starts = [*(definition.start() for definition in definitions), len(text)]
    return {
        definition[1]: _NAME.findall(text, definition.end(), end)
        for definition, end in zip(definitions, starts[1:], strict=True)
    }
