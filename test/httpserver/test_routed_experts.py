"""Which requests may have the experts of their tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.routed_experts import experts_shape
from lightserve.messages.params import GenerationParams, GrammarSpec


def test_they_are_refused_beside_a_grammar() -> None:
    """Tokens that it forces reach the router before anybody has read their experts."""
    shape = object()
    context: Any = SimpleNamespace(manager=SimpleNamespace(limits=SimpleNamespace(routed_experts=shape)))
    assert experts_shape(context, GenerationParams()) is shape

    with pytest.raises(InvalidRequestError, match="return_routed_experts: not with a grammar"):
        experts_shape(context, GenerationParams.of(grammar=GrammarSpec("regex", "a+")))
