"""The figures of a comparison are those of their definitions."""

from __future__ import annotations

import pytest
import torch

from lightserve.parity.compare import ROWS_AT_ONCE, combined, compare_logits, first_difference, row_errors


def test_figures_are_those_of_all_rows_also_of_more_than_are_compared_at_once() -> None:
    torch.manual_seed(0)
    theirs = torch.randn(3 * ROWS_AT_ONCE + 5, 20)
    ours = theirs + 0.3 * torch.randn_like(theirs)

    found = compare_logits(ours, theirs)

    p, q = theirs.softmax(-1), ours.softmax(-1)
    assert found.rows == len(theirs)
    assert found.max_diff == pytest.approx(float((ours - theirs).abs().max()))
    assert found.mean_diff == pytest.approx(float((ours - theirs).abs().mean()), rel=1e-4)
    assert found.largest == pytest.approx(float(theirs.abs().max()))
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    assert found.same_argmax == int((ours.argmax(-1) == theirs.argmax(-1)).sum()) < found.rows
    assert found.relative == pytest.approx(found.max_diff / found.largest)


def test_prompts_count_by_their_rows() -> None:
    theirs = torch.randn(9, 20)
    ours = theirs + torch.randn(9, 20)

    parts = [compare_logits(ours[:2], theirs[:2]), compare_logits(ours[2:], theirs[2:])]

    whole = compare_logits(ours, theirs)
    assert combined(parts).mean_diff == pytest.approx(whole.mean_diff, rel=1e-4)
    assert combined(parts).kl == pytest.approx(whole.kl, rel=1e-4)
    assert combined(parts).max_diff == whole.max_diff


@pytest.mark.parametrize("place", [0, 2])
def test_nan_is_within_no_tolerance(place: int) -> None:
    theirs = torch.randn(3, 5)
    ours = theirs.clone()
    ours[place, 1] = float("nan")

    assert not compare_logits(ours, theirs).relative <= 1e9
    assert not combined([compare_logits(theirs, theirs), compare_logits(ours, theirs)]).relative <= 1e9
    assert int(row_errors(ours, theirs).isnan().sum()) == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "place"), [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([], [1], 0)]
)
def test_the_first_token_that_differs_is_found(ours: list[int], theirs: list[int], place: int | None) -> None:
    assert first_difference(ours, theirs) == place
