"""Requests with images wait for the encoder, and rows of the arena are never given away too early."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest

from lightserve.media.tokens import digest_of, ids_of, with_image_ids
from lightserve.messages.int_arrays import int32s
from lightserve.messages.media import EncodeImage, EncoderStarted, ImageEncoded, ImageItem
from lightserve.messages.params import BACKGROUND_PRIORITY, GenerationParams
from lightserve.messages.step import NewReq
from lightserve.router.images.image_waits import ImageWaits
from lightserve.router.kv.pool import KvPool
from lightserve.router.req import Req
from lightserve.router.scheduler import GroupScheduler, Scheduler, SchedulerLimits
from lightserve.router.scheduler.decodes import Decodes
from lightserve.router.scheduler.step_cost import MIN_STEPS
from lightserve.simulate.replica import LIMITS

PLACEHOLDER = 5


class Encoder:
    """Or several: they hold the images that they were sent, until the test completes them."""

    def __init__(self, rows: int, count: int = 1) -> None:
        self.sent: list[EncodeImage] = []
        self.numbers: dict[bytes, int] = {}  # by digest: to which encoder it was sent
        self.generations = [0] * count
        self.waits = ImageWaits(lambda encoder, generation: partial(self._receive, encoder))
        for number in range(count):
            self.waits.start_encoder(EncoderStarted(0, rows, number))

    def _receive(self, number: int, message: EncodeImage) -> None:
        self.sent.append(message)
        self.numbers[message.digest] = number

    def sent_to(self, number: int) -> list[bytes]:
        """The files."""
        return [message.data for message in self.sent if self.numbers[message.digest] == number]

    def complete(self, status: int = 200, encode_s: float = 1.0) -> frozenset[int]:
        """The first image. Returns the requests that fail."""
        digest = self.sent.pop(0).digest
        number = self.numbers.pop(digest)
        done = ImageEncoded(self.generations[number], digest, status, "damaged", encode_s=encode_s, encoder=number)
        failed = self.waits.complete(done)
        return frozenset() if failed is None else failed.req_ids

    def crash(self, number: int = 0) -> set[int]:
        """Returns the requests that fail."""
        self.sent = [message for message in self.sent if self.numbers[message.digest] != number]
        self.generations[number] += 1
        failed = self.waits.start_encoder(EncoderStarted(self.generations[number], 0, number))
        return {req_id for each in failed for req_id in each.req_ids}


def item(name: str, start: int, tokens: int) -> ImageItem:
    return ImageItem(
        digest_of(name.encode()), ((start, tokens),), 1, tokens, 28, 28 * tokens, PLACEHOLDER, name.encode()
    )


def request(req_id: int, *names: str, tokens: int = 4, priority: int = 0) -> Req:
    """An image after each token of text."""
    images = [item(name, 1 + number * (tokens + 1), tokens) for number, name in enumerate(names)]
    ids = [1] if not images else [1, *[PLACEHOLDER] * tokens] * len(images) + [2]
    params = GenerationParams.of(max_new_tokens=3)
    prompt_ids = with_image_ids(int32s(ids), images)
    return Req(req_id, prompt_ids, params, 3, (), priority=priority, images=tuple(images))


background = partial(request, priority=BACKGROUND_PRIORITY)


def test_a_request_waits_until_all_its_images_are_encoded() -> None:
    encoder, req = Encoder(100), request(1, "a", "b")

    encoder.waits.enter(req, 0)

    assert [message.data for message in encoder.sent] == [b"a", b"b"]
    assert encoder.waits.wait_of(req, 0) is not None
    encoder.complete()
    assert encoder.waits.wait_of(req, 0) is not None
    encoder.complete()
    assert encoder.waits.wait_of(req, 0) is None


def test_an_image_is_encoded_once_for_all_its_requests() -> None:
    encoder = Encoder(100)
    for req_id in range(3):
        encoder.waits.enter(request(req_id, "a"), 0)

    assert len(encoder.sent) == 1
    encoder.complete()
    encoder.waits.enter(request(7, "a"), 0)
    assert not encoder.sent
    assert encoder.waits.hits == {"kv": 0, "embedding": 3, "none": 1}


def test_an_image_whose_kv_is_cached_is_not_encoded() -> None:
    encoder, req = Encoder(100), request(1, "a", "b")

    encoder.waits.enter(req, 5)

    assert [message.data for message in encoder.sent] == [b"b"]
    encoder.complete()
    rows = encoder.waits.as_new(req, NewReq(1, req.prompt_ids, req.params.sampling, 0)).images
    assert [len(image.arena_rows) for image in rows] == [0, 4]


def test_the_workers_get_ids_of_the_vocabulary() -> None:
    encoder, req = Encoder(100), request(1, "a")
    encoder.waits.enter(req, 0)
    encoder.complete()

    new = encoder.waits.as_new(req, NewReq(1, req.prompt_ids, req.params.sampling, 0))

    assert list(new.token_ids) == [1, *[PLACEHOLDER] * 4, 2]
    assert list(req.prompt_ids[1:5]) == list(ids_of(digest_of(b"a"), 4))


def test_a_request_waits_for_rows_that_others_hold_and_holds_none_meanwhile() -> None:
    encoder, first, second = Encoder(8), request(1, "a", "b"), request(2, "c", "d")
    encoder.waits.enter(first, 0)
    encoder.complete()
    encoder.complete()
    encoder.waits.enter(second, 0)

    assert not encoder.sent
    assert encoder.waits.wait_of(second, 0) is not None
    encoder.waits.drop(first)
    assert encoder.waits.wait_of(second, 0) is not None  # for the encoder now
    assert [message.data for message in encoder.sent] == [b"c", b"d"]


def test_images_that_can_never_fit_are_refused() -> None:
    reason = Encoder(7).waits.why_refused(request(1, "a", "b").images)

    assert reason == "the images of the request have 8 tokens; the limit is 7 (--embed_cache_gb)"


def test_rows_under_way_are_not_given_away_when_their_request_is_aborted() -> None:
    encoder, first, second = Encoder(4), request(1, "a"), request(2, "b")
    encoder.waits.enter(first, 0)
    encoder.waits.drop(first)
    encoder.waits.enter(second, 0)

    assert [message.data for message in encoder.sent] == [b"a"]
    encoder.complete()
    assert encoder.waits.wait_of(second, 0) is not None
    assert [message.data for message in encoder.sent] == [b"b"]


def test_an_image_that_cannot_be_decoded_fails_all_its_requests_and_no_other() -> None:
    encoder = Encoder(100)
    for req_id, name in enumerate("aab"):
        encoder.waits.enter(request(req_id, name), 0)

    assert encoder.complete(status=400) == {0, 1}
    assert encoder.complete() == set()
    assert encoder.waits.pool.used_rows == 4


def test_after_a_crash_images_go_one_at_a_time_until_the_guilty_one_is_known() -> None:
    encoder = Encoder(100)
    for req_id, name in enumerate("abc"):
        encoder.waits.enter(request(req_id, name), 0)
    assert len(encoder.sent) == 3

    assert encoder.crash() == set()
    assert [message.data for message in encoder.sent] == [b"a"]
    encoder.complete()
    assert [message.data for message in encoder.sent] == [b"b"]
    assert encoder.crash() == {1}
    assert [message.data for message in encoder.sent] == [b"c"]
    encoder.complete()
    assert encoder.waits.pool.used_rows == 8


def test_an_image_goes_to_the_encoder_with_the_fewest_tokens() -> None:
    encoder = Encoder(100, count=2)
    for req_id, (name, tokens) in enumerate([("a", 8), ("b", 4), ("c", 4), ("d", 2)]):
        encoder.waits.enter(request(req_id, name, tokens=tokens), 0)

    assert encoder.sent_to(0) == [b"a", b"d"]
    assert encoder.sent_to(1) == [b"b", b"c"]


def test_images_of_clients_go_before_those_of_background_requests() -> None:
    encoder = Encoder(100, count=2)
    for req_id, name in enumerate("abcdefg"):
        encoder.waits.enter(background(req_id, name), 0)
    assert [message.data for message in encoder.sent] == [b"a", b"b", b"c", b"d"]  # two each: they take their turns

    encoder.waits.enter(request(10, "x"), 0)
    encoder.waits.enter(request(11, "g"), 0)

    assert [message.data for message in encoder.sent[4:]] == [b"x", b"g"]
    encoder.complete()
    assert [message.data for message in encoder.sent[5:]] == [b"e"]


def test_a_fast_encoder_has_more_images_of_background_requests() -> None:
    encoder = Encoder(200)
    for req_id in range(40):
        encoder.waits.enter(background(req_id, str(req_id)), 0)
    assert len(encoder.sent) == 2

    encoder.complete(encode_s=0.01)

    assert len(encoder.sent) == 25


def test_background_requests_leave_rows_to_clients() -> None:
    encoder = Encoder(20)
    for req_id, name in enumerate("abcde"):
        encoder.waits.enter(background(req_id, name), 0)
    assert encoder.waits.pool.used_rows == 12

    for req_id, name in enumerate("xy", start=10):
        encoder.waits.enter(request(req_id, name), 0)

    assert encoder.waits.pool.used_rows == 20
    assert [message.data for message in encoder.sent[-2:]] == [b"x", b"y"]


def test_a_background_request_may_have_all_rows_if_nobody_has_any() -> None:
    encoder = Encoder(20)

    encoder.waits.enter(background(1, "a", tokens=20), 0)

    assert len(encoder.sent) == 1


def test_the_images_of_an_encoder_that_died_are_sent_again_and_those_of_the_other_are_not() -> None:
    encoder = Encoder(100, count=2)
    for req_id, name in enumerate("abcd"):
        encoder.waits.enter(request(req_id, name), 0)
    assert encoder.sent_to(1) == [b"b", b"d"]

    assert encoder.crash(0) == set()
    assert encoder.sent_to(1) == [b"b", b"d"]
    assert encoder.sent_to(0) == [b"a"]  # alone: it may be at fault
    assert encoder.crash(0) == {0}
    assert encoder.sent_to(0) == [b"c"]
    for _ in range(3):
        encoder.complete()
    assert encoder.waits.pool.used_rows == 12


class Steps:
    """Of one prompt each. An image may be at the encoder when a step begins, when it ends, or both."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.group = GroupScheduler(KvPool(100_000), limits)
        self.num_reqs = 0
        self._encoder = Encoder(100)
        self.group.enable_images(self._encoder.waits)

    def run(self, seconds: float, encodes_at_begin: bool = False, encodes_at_end: bool = False) -> None:
        scheduler, number = Scheduler(self.group), self.num_reqs
        self.num_reqs += 1
        params = GenerationParams.of(max_new_tokens=3)
        scheduler.add(Req(number, int32s([number, *range(499)]), params, 3, (), salt=str(number)))
        self._encode(encodes_at_begin)
        scheduler.next_step()
        self._encode(encodes_at_end)
        scheduler.complete_step(seconds)
        self._encode(False)
        scheduler.abort(number)

    def _encode(self, goes_on: bool) -> None:
        """Whether an image is at the encoder from now on."""
        image = request(-2, "a")
        if goes_on:
            self._encoder.waits.enter(image, 0)
        elif self._encoder.sent:
            self._encoder.complete(400)

    @property
    def budget(self) -> int:
        """Of a step with a long prompt beside two streams."""
        long_prompt = Req(-1, int32s([1] * 9_000), GenerationParams.of(max_new_tokens=3), 3, ())
        return self.group.chunking.budget([long_prompt], Decodes(np.arange(2)), 0)


@pytest.mark.parametrize("when", [(True, True), (True, False), (False, True)])
def test_an_encoder_on_the_device_does_not_make_the_chunks_of_long_prompts_smaller(when: tuple[bool, bool]) -> None:
    steps = Steps(LIMITS)
    for _ in range(MIN_STEPS):
        steps.run(0.010)
    before = steps.budget
    for _ in range(50):
        steps.run(0.020, *when)

    assert steps.budget == before == 1024 - 2  # in 20 ms
    for _ in range(300):
        steps.run(0.020)
    assert steps.budget == 512 - 2, "the device has become slower"


def test_the_time_of_steps_beside_an_encoder_counts_if_no_others_have_ended() -> None:
    steps = Steps(LIMITS)
    for _ in range(MIN_STEPS):
        steps.run(0.010, True, True)

    assert steps.budget == 1024 - 2


def test_the_operators_limit_holds_for_steps_beside_an_encoder() -> None:
    steps = Steps(replace(LIMITS, max_step_s=0.020))
    for _ in range(MIN_STEPS):
        steps.run(0.010)
    for _ in range(100):
        steps.run(0.020, True, True)

    assert 480 < steps.budget < 640


def test_an_encoder_that_was_replaced_is_not_believed() -> None:
    encoder = Encoder(100, count=2)
    encoder.waits.enter(request(1, "a"), 0)
    late = ImageEncoded(0, encoder.sent[0].digest)
    encoder.crash(0)

    encoder.waits.complete(late)

    assert encoder.waits.wait_of(request(1, "a"), 0) is not None


@pytest.mark.parametrize("number", range(6))
def test_rows_are_never_shared_and_none_is_lost(number: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # shown if it fails
    generator, encoder = random.Random(seed), Encoder(20, count=1 + number % 3)
    reqs: dict[int, Req] = {}
    for req_id in range(300):
        if generator.random() < 0.4:
            names = generator.sample("abcdefgh", generator.randrange(1, 4))
            priority = generator.choice((0, BACKGROUND_PRIORITY))
            req = request(req_id, *names, tokens=generator.randrange(1, 6), priority=priority)
            if not encoder.waits.why_refused(req.images):
                reqs[req_id] = req
                encoder.waits.enter(req, 0)
        else:
            for leaving in _happen(encoder, generator, reqs):
                encoder.waits.drop(reqs.pop(leaving))
        for req in reqs.values():
            encoder.waits.wait_of(req, 0)
        _check_rows(encoder, seed)
    for req in reqs.values():
        encoder.waits.drop(req)
    while encoder.sent:
        encoder.complete()
    pool = encoder.waits.pool

    assert pool.available_rows == 20, seed
    assert encoder.waits.file_bytes == 0, seed
    assert not encoder.waits._files


def _happen(encoder: Encoder, generator: random.Random, reqs: dict[int, Req]) -> set[int]:
    """An image is encoded or fails, the encoder crashes, or a client leaves. Returns the requests that end."""
    event = generator.random()
    if event < 0.4 and encoder.sent:
        status, encode_s = generator.choice((200, 200, 200, 400)), generator.choice((0.01, 1.0))
        return {*encoder.complete(status, encode_s)}
    if event < 0.5:
        return encoder.crash(generator.randrange(len(encoder.generations)))
    return {generator.choice(list(reqs))} if reqs else set()


def _check_rows(encoder: Encoder, seed: int) -> None:
    pool = encoder.waits.pool
    rows = [pool._free, *(image.arena_rows for image in pool._images.values())]
    assert sorted(np.concatenate(rows).tolist()) == list(range(20)), seed
    for message in encoder.sent:
        image = pool.find(message.digest)
        assert image is not None, seed
        assert np.array_equal(image.arena_rows, message.arena_rows), seed


def test_few_equal_ids_of_an_image_are_not_taken_from_the_cache() -> None:
    pool, first = KvPool(100), request(1, "a", tokens=6)
    pool.attach_prefix(first)
    first.begin()
    first.plan(pool.alloc(len(first.prompt_ids)))
    pool.cache_prompt(first)

    for equal in range(1, 7):
        second = request(2, "b", tokens=6)
        second.prompt_ids[1 : 1 + equal] = first.prompt_ids[1 : 1 + equal]
        pool.attach_prefix(second)

        assert pool.cached_len(second) == second.shared_len == (1 if equal < 4 else 1 + equal)
        pool.release(second)


def test_a_request_keeps_no_file_of_an_image() -> None:
    encoder, req = Encoder(100), request(1, "a")

    encoder.waits.enter(req, 0)
    without_file = msgspec.structs.replace(req.images[0], spans=((0, 4),))

    assert req.images[0].data == b""
    assert encoder.waits.why_refused([without_file]) == ""
    encoder.waits.drop(req)
    assert encoder.waits.why_refused([without_file]) == "the file of an image is not known"
