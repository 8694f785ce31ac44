"""A sequence that a route wants of the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightserve.messages.media import ImageItem
from lightserve.messages.params import GenerationParams, SchedulingParams

DEFAULT_SCHEDULING = SchedulingParams()


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt, how to continue it, and how to schedule it."""

    prompt_ids: list[int]
    params: GenerationParams
    scheduling: SchedulingParams = DEFAULT_SCHEDULING
    group: int | None = None  # sequences of a group always share prefixes; None: one group for each prompt's choices
    parent: int | None = None  # index of the sequence before ``continue_with`` whose prompt comes before ``prompt_ids``
    images: tuple[ImageItem, ...] = ()  # in the prompt

    @property
    def placeholder(self) -> int | None:
        """The token id that stands for tokens of its images; None: it has none."""
        return self.images[0].placeholder if self.images else None

    def images_to_send(self, is_first: bool) -> list[ImageItem]:
        """With their files, if this ``is_first`` of the sequences with this prompt."""
        return [image if is_first else image.without_file for image in self.images]


def with_seed(prompt_request: PromptRequest, choice: int) -> PromptRequest:
    """Give each choice of a prompt its own seed, the same every time."""
    seed = prompt_request.params.sampling.seed
    if seed is None or choice == 0:
        return prompt_request
    return replace(prompt_request, params=prompt_request.params.replace(seed=(seed + choice + 2**63) % 2**64 - 2**63))


def with_seeds(reqs: Sequence[PromptRequest], seeds: Sequence[int] | None) -> tuple[list[PromptRequest], list[int]]:
    """None: the seeds of the requests, random ones where they have none. Returns the seeds too."""
    if seeds is None:
        given = [req.params.sampling.seed for req in reqs]
        seeds = [random.getrandbits(63) if seed is None else seed for seed in given]
    pairs = zip(reqs, seeds, strict=True)
    return [replace(req, params=req.params.replace(seed=seed)) for req, seed in pairs], list(seeds)
