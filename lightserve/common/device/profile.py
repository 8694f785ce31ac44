"""What differs between GPU models: their size, and the numbers that were tuned for them.

The numbers of the H200 were measured. Every other GPU gets a profile that ``gpu_profile`` derives from its properties.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from lightserve.messages.control import DEFAULT_RUNNING, StepLimits

KIB = 1024
TILE_TOKENS = 128  # of a matmul: a step takes as long as one of the next multiple
CHUNK_TOKENS = 64
# 64 streams of Qwen3-30B-A3B on an H200: 2,709 tokens/s with chunks of 256 tokens, 2,868 with 1,024, 3,056 with 2,048
MAX_SPARSE_GROWTH = 16
MAX_PACKED_BYTES = 0.8  # of a weight: 4 or 5 bits, and its part of a scale
LARGE_MEMORY_BYTES = 64 * 2**30  # of a GPU that holds the KV of as many requests as an H200 runs
MIN_FP8_SHARE = 0.5  # heads and single layers may be unquantised


@dataclass(frozen=True, slots=True)
class GraphRanges:
    """Shapes of steps that are captured as graphs. A step is padded to the next one."""

    decodes: tuple[int, ...]  # numbers of requests of a decode step
    tokens: tuple[int, ...]  # numbers of tokens of a step with prompts
    prefill_requests: int  # most requests of a step without decodes
    requests: tuple[int, ...]  # numbers of requests of a step with prompts and decodes
    max_launch_bound_tokens: int  # larger steps compute for longer than Python takes to launch them
    slow_launch_requests: int  # with more requests launching is so slow that larger steps are captured too
    max_padding: int  # in tokens: computing so many takes no longer than a graph saves
    max_shared_tokens: int  # of steps with prompts that are captured for shared prefixes too: larger ones save little
    max_draft_tokens: int = (
        512  # of steps of decodes with drafts: larger ones compute for long, so they have few drafts
    )


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    step_limits: StepLimits  # unless the operator sets others
    multiprocessors: int  # that run thread blocks; the cores of a CPU
    shared_bytes: int = 0  # shared memory that one thread block may ask for (opt-in); 0: there is none
    launch_lead_s: float = 0.0  # how long planning, sending and launching the next step takes
    graphs: GraphRanges | None = None  # None: the device has no graphs
    packed_growth: float = 1.0  # of chunks, if weights are dequantised for each step with prompts
    fp8_growth: float = 1.0  # of chunks, if products are computed in fp8


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What makes steps of a model take longer or shorter than those of a dense model in bfloat16."""

    active_share: float = 1.0  # of the layers' weights that a token uses
    bytes_per_weight: float = 2.0
    fp8_share: float = 0.0  # of the layers' weights whose products are computed in fp8


# The step sizes are those of an 8B model. A decode step takes 5 ms, and 10 ms with 384 tokens, prompt tokens included.
# Its matmuls take longer for 448 tokens than for 512, and for 1,088 a fifth longer than for 1,024.
H200_LIMITS = StepLimits(
    batch_max_tokens=8192,
    chunked_prefill_size=256,
    preferred_step_tokens=(256, 384, 512, 768, 1024, 1280, 1536),
    long_prompt_step_s=20e-3,
    max_running=512,  # 320 streams of 1,024 + 256 tokens have a TTFT p50 of 0.6 s, simulated; 2.8 with 256
)
H200_GRAPHS = GraphRanges(
    # A step of few rows costs what reading the weights costs, so the steps between these are padded.
    decodes=(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512),
    tokens=(64, 128, 256, 384, 512, 768, 1024, 1280, 1536),
    prefill_requests=8,
    requests=(24, 40, 72, 136, 264),
    # Launching a step from Python takes up to 29 ms, which computing more than 1,024 tokens hides.
    max_launch_bound_tokens=1024,
    slow_launch_requests=128,
    max_padding=256,
    max_shared_tokens=512,
)
H200 = Profile(
    name="NVIDIA H200",
    step_limits=H200_LIMITS,
    multiprocessors=132,
    shared_bytes=227 * KIB,
    launch_lead_s=3e-3,  # with 256 requests
    graphs=H200_GRAPHS,
    # Dequantising the 4-bit weights of Llama-3-8B takes 5 ms, as long as the matmuls of 250 prompt tokens.
    packed_growth=2.0,
    # fp8 products take half the time. 64 streams of Llama-3-8B in fp8: 6,983 tokens/s with chunks of 256 tokens, 7,113
    # with 512, and no more if steps of up to 1,536 tokens are captured.
    fp8_growth=2.0,
)
MEASURED = (H200,)


def gpu_profile(name: str, multiprocessors: int, shared_bytes: int, memory_bytes: int = 0) -> Profile:
    """The measured profile of a GPU, or one that is derived from the H200's.

    A GPU with fewer multiprocessors computes fewer tokens in the same time. So numbers of tokens shrink in proportion
    to the multiprocessors, rounded to whole tiles of a matmul; they never grow past what was measured. The host's
    launches cost the same, so the numbers of requests and the launch lead stay.
    """
    for measured in MEASURED:
        if name == measured.name and multiprocessors == measured.multiprocessors:
            return measured
    limits, graphs = H200_LIMITS, H200_GRAPHS
    share = min(multiprocessors / H200.multiprocessors, 1.0)
    sizes = _scaled(limits.preferred_step_tokens, share)
    chunk = _rounded((limits.chunked_prefill_size or 0) * share, CHUNK_TOKENS)
    return replace(
        H200,
        name=name,
        multiprocessors=multiprocessors,
        shared_bytes=shared_bytes,
        step_limits=msgspec.structs.replace(
            limits,
            chunked_prefill_size=chunk,
            preferred_step_tokens=sizes,
            max_running=limits.max_running if memory_bytes >= LARGE_MEMORY_BYTES else DEFAULT_RUNNING,
        ),
        graphs=replace(
            graphs,
            tokens=tuple(sorted({*graphs.tokens[:2], *sizes})),  # the scheduler's sizes, and two for short prompts
            max_launch_bound_tokens=_rounded(graphs.max_launch_bound_tokens * share, TILE_TOKENS),
            max_shared_tokens=_rounded(graphs.max_shared_tokens * share, TILE_TOKENS),
            max_draft_tokens=_rounded(graphs.max_draft_tokens * share, TILE_TOKENS),
        ),
    )


def for_model(profile: Profile, traits: ModelTraits) -> Profile:
    """The profile with the step sizes of a model.

    A step of a mixture of experts reads all of them for a few hundred tokens already. So more prompt tokens beside the
    decodes cost little: for Qwen3-30B-A3B on an H200 a step of 64 decodes takes 18 ms, and 9 ms more with 1,024 prompt
    tokens. Weights of 4 bits are dequantised for each step with prompts, however short.
    """
    growth = min(1 / traits.active_share, MAX_SPARSE_GROWTH)
    if traits.bytes_per_weight <= MAX_PACKED_BYTES:
        growth *= profile.packed_growth
    if traits.fp8_share > MIN_FP8_SHARE:
        growth *= profile.fp8_growth
    return replace(profile, step_limits=_with_longer_chunks(profile.step_limits, growth))


def _with_longer_chunks(limits: StepLimits, growth: float) -> StepLimits:
    if limits.chunked_prefill_size is None:
        return limits
    return msgspec.structs.replace(limits, chunked_prefill_size=int(limits.chunked_prefill_size * growth))


def _scaled(sizes: tuple[int, ...], share: float) -> tuple[int, ...]:
    return tuple(sorted({_rounded(size * share, TILE_TOKENS) for size in sizes}))


def _rounded(tokens: float, tile: int) -> int:
    return max(round(tokens / tile), 1) * tile
