"""KV that depends on the tokens after it, as that of draft heads does: the end of a cached prefix is not shared."""

from __future__ import annotations

import pytest

from test.router.scheduler.test_scheduler import Server, make, make_req

PROMPT = list(range(1000, 1040))


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("common", [0, 1, 2, 30])
def test_a_request_computes_the_last_tokens_of_a_cached_prefix_again(lookahead: int, common: int) -> None:
    server = Server(make(1000, kv_lookahead=lookahead))
    server.run([make_req(0, PROMPT)])
    req = make_req(1, [*PROMPT[:common], 1, 2, 3])

    server.run([req])

    assert req.cached_len == max(common - lookahead, 0)
    server.assert_idle()


def test_the_whole_prompt_is_cached_when_its_request_has_ended() -> None:
    server = Server(make(1000, kv_lookahead=1))
    prompts = [[*PROMPT, 1, 2, 3], [*PROMPT, 1, 2, 3, 4]]
    for number, prompt in enumerate([PROMPT, *prompts]):
        req = make_req(number, prompt)
        server.run([req])

    assert req.cached_len == len(PROMPT) + 3 - 1
    server.assert_idle()
