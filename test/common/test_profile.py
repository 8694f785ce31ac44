"""The numbers that are tuned for a card, and how those of other cards follow from its size."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from lightserve.common.device.profile import (
    H200,
    H200_LIMITS,
    KIB,
    GraphRanges,
    ModelTraits,
    Profile,
    for_model,
    gpu_profile,
)
from lightserve.messages.control import StepLimits
from lightserve.worker.captured_shapes import graph_shape_for, graph_shapes

CARDS = {  # multiprocessors, KiB of shared memory that a thread block may have, GiB of memory
    "NVIDIA A100-SXM4-80GB": (108, 163, 79),
    "NVIDIA B200": (148, 227, 178),
    "NVIDIA GeForce RTX 4090": (128, 99, 23),
    "NVIDIA H100 80GB HBM3": (132, 227, 79),
    "NVIDIA L4": (58, 99, 22),
    "NVIDIA L40S": (142, 99, 44),
}


def profile_of(name: str) -> Profile:
    multiprocessors, shared_kib, memory_gib = CARDS[name]
    return gpu_profile(name, multiprocessors, shared_kib * KIB, memory_gib * 2**30)


def graphs_of(profile: Profile) -> GraphRanges:
    assert profile.graphs is not None
    return profile.graphs


def test_an_h200_has_the_profile_that_was_measured() -> None:
    assert gpu_profile("NVIDIA H200", 132, 232_448, 139 * 2**30) is H200


@pytest.mark.parametrize("name", CARDS)
def test_a_card_keeps_its_own_size_and_computes_no_more_tokens_than_were_measured(name: str) -> None:
    profile = profile_of(name)

    assert (profile.multiprocessors, profile.shared_bytes) == (CARDS[name][0], CARDS[name][1] * KIB)
    assert max(profile.step_limits.preferred_step_tokens) <= max(H200.step_limits.preferred_step_tokens)
    assert 0 < (profile.step_limits.chunked_prefill_size or 0) <= 256
    assert all(size % 128 == 0 for size in profile.step_limits.preferred_step_tokens)
    assert profile.launch_lead_s == H200.launch_lead_s


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA B200", "NVIDIA L40S"])
def test_a_card_as_large_as_an_h200_has_its_step_sizes(name: str) -> None:
    profile = profile_of(name)

    max_running = H200.step_limits.max_running
    assert msgspec.structs.replace(profile.step_limits, max_running=max_running) == H200.step_limits
    assert profile.graphs == H200.graphs


@pytest.mark.parametrize("name", CARDS)
def test_a_card_with_the_memory_for_it_runs_as_many_requests_as_an_h200(name: str) -> None:
    is_large = CARDS[name][2] >= 64

    assert profile_of(name).step_limits.max_running == (512 if is_large else 256)


def test_the_steps_of_a_card_of_under_half_the_size_are_half_as_long() -> None:
    profile = profile_of("NVIDIA L4")

    assert profile.step_limits.chunked_prefill_size == 128
    assert profile.step_limits.preferred_step_tokens == (128, 256, 384, 512, 640)
    assert graphs_of(profile).tokens == (64, 128, 256, 384, 512, 640)
    assert graphs_of(profile).max_launch_bound_tokens == 512


@pytest.mark.parametrize("name", CARDS)
def test_every_step_size_is_captured_and_every_captured_shape_is_padded_to_itself(name: str) -> None:
    profile = profile_of(name)
    ranges = graphs_of(profile)

    assert set(profile.step_limits.preferred_step_tokens) <= set(ranges.tokens)
    for shape in graph_shapes(256, ranges):
        assert graph_shape_for(shape, ranges) == shape


def test_a_mixture_of_experts_has_longer_chunks_and_a_dense_model_the_same() -> None:
    unchunked = replace(H200, step_limits=StepLimits(2048))

    assert for_model(H200, ModelTraits()) == H200
    assert for_model(H200, ModelTraits(active_share=0.5)).step_limits.chunked_prefill_size == 512
    assert for_model(H200, ModelTraits(active_share=0.01)).step_limits.chunked_prefill_size == 4096
    assert for_model(unchunked, ModelTraits(active_share=0.1)) == unchunked


def test_chunks_are_longer_if_weights_are_dequantised_first() -> None:
    cpu = Profile("cpu", H200_LIMITS, multiprocessors=2)

    assert for_model(H200, ModelTraits(bytes_per_weight=0.53)).step_limits.chunked_prefill_size == 512
    assert for_model(H200, ModelTraits(bytes_per_weight=1.0)) == H200
    assert for_model(cpu, ModelTraits(bytes_per_weight=0.53, fp8_share=1.0)) == cpu


def test_chunks_are_longer_if_products_are_computed_in_fp8() -> None:
    profile = for_model(H200, ModelTraits(bytes_per_weight=1.0, fp8_share=0.9))

    assert profile.step_limits.chunked_prefill_size == 512
    assert profile.graphs == H200.graphs
