from __future__ import annotations

import random

import pytest
import torch

from lightserve.common import ops
from lightserve.worker.sampling.verification import NO_DRAFT, SyntheticAcceptance, verify


def longest_accepted(sampled: list[int], drafts: list[int]) -> int:
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == sampled[accepted] != NO_DRAFT:
        accepted += 1
    return accepted


@pytest.mark.parametrize("seed", range(5))
def test_drafts_are_accepted_up_to_the_first_that_was_not_sampled(seed: int) -> None:
    rng = random.Random(seed)
    drafts = [rng.choices((-1, 0, 1), (1, 8, 1), k=rng.randrange(5)) for _ in range(200)]
    sampled = [rng.choices((-1, 0, 1), (1, 8, 1), k=len(own) + 1) for own in drafts]
    accepted = [longest_accepted(*pair) for pair in zip(sampled, drafts, strict=True)]
    lengths = torch.tensor([len(own) for own in sampled])

    counts, last_ids = verify(
        torch.tensor([token for own in sampled for token in own]),
        torch.tensor([token for own in drafts for token in (*own, NO_DRAFT)]),
        lengths.cumsum(0) - lengths,
        max_drafts=4,
    )

    assert counts.tolist() == [count + 1 for count in accepted]
    assert last_ids.tolist() == [own[count] for own, count in zip(sampled, accepted, strict=True)]
    assert set(accepted) == set(range(5))


def test_a_step_whose_drafts_are_all_absent_accepts_none() -> None:
    sampled = torch.tensor([5, ops.NO_TOKEN, 7])

    counts, last_ids = verify(sampled, torch.full((3,), NO_DRAFT), torch.arange(3), max_drafts=0)

    assert counts.tolist() == [1, 1, 1]
    assert last_ids.tolist() == sampled.tolist()


@pytest.mark.parametrize("draft", [0, 1, 4])
def test_a_draft_is_accepted_with_its_probability_and_refusing_it_keeps_the_distribution(draft: int) -> None:
    runs = 20_000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    probs = logits.softmax(-1)
    rows = logits.expand(runs, -1)
    sampled = ops.sample(rows, torch.ones(runs), torch.arange(runs), torch.full((runs,), 9, dtype=torch.int32))

    counts, last_ids = verify(
        torch.stack((sampled, sampled), 1).view(-1),
        torch.tensor([draft, NO_DRAFT]).repeat(runs),
        2 * torch.arange(runs),
        max_drafts=1,
    )

    is_accepted = counts == 2
    refused = last_ids[~is_accepted]
    others = probs.clone()
    others[draft] = 0
    shares = torch.bincount(refused, minlength=5) / len(refused)
    error = 4 * 0.5 / len(refused) ** 0.5  # four standard deviations
    assert abs(float(is_accepted.float().mean()) - float(probs[draft])) < error
    torch.testing.assert_close(shares, others / others.sum(), atol=error, rtol=0)
    assert shares[draft] == 0


@pytest.mark.parametrize("length", [1.0, 1.5, 2.79, 3.0, 4.0])
def test_a_synthetic_schedule_accepts_so_many_drafts_on_average_in_steps_that_differ_by_one(length: float) -> None:
    steps = 20_000
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(2**31, (steps,), generator=generator).repeat_interleave(3)
    number, position = torch.arange(3).repeat(steps), torch.randint(9_000, (3 * steps,), generator=generator).int()

    accepted = SyntheticAcceptance.of_length(length).accepts(number, seeds, position).view(steps, 3).cumprod(-1).sum(-1)

    assert abs(float(accepted.double().mean()) + 1 - length) < 0.02
    assert int(accepted.max() - accepted.min()) == (0 if length == int(length) else 1)
