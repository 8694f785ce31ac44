"""KV of every layout through host memory and back."""

from __future__ import annotations

import pytest
import torch

from lightserve.common.device import pick_device
from lightserve.common.kv.cpu_kv import block_bytes, block_formats
from lightserve.common.kv.layout import KvContent, KvGroup, KvLayout
from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.step import KvLoad, KvStore
from lightserve.worker.kv.offload.cpu_offload import CpuOffload

SIZE, NUM_BLOCKS = 400, 3
LAYOUTS = {
    "float32": KvLayout.uniform(3, 2, 8, torch.float32),
    "bfloat16": KvLayout.uniform(2, 1, 64, torch.bfloat16),
    "fp8": KvLayout.uniform(2, 3, 5, torch.float8_e4m3fn),
    "int8 with scales": KvLayout((KvGroup((0, 1), 3, 16, 16, torch.int8, torch.float32),)),
    "latent": KvLayout((KvGroup((0, 1, 2), 1, 72, 0, torch.bfloat16),)),
    "latent in int8": KvLayout.latents((0, 1), (72, 8), "int8", torch.bfloat16),
    "latent in fp8": KvLayout.latents((0, 2), (72, 8), "fp8", torch.bfloat16),
    "latent and keys that choose tokens": KvLayout(
        (
            KvGroup((0, 1, 2), 1, 72, 0, torch.bfloat16),
            KvGroup((0, 2), 1, 16, 0, torch.bfloat16, content=KvContent.INDEX_KEYS),
        )
    ),
    "unequal keys and values": KvLayout((KvGroup((0, 1), 2, 24, 16, torch.float16),)),
    "two groups, one with a window": KvLayout(
        (
            KvGroup((0, 2), 2, 8, 8, torch.bfloat16),
            KvGroup((1, 3), 1, 16, 16, torch.int8, torch.float32, window=16),
        )
    ),
}


def filled(
    layout: KvLayout, device: torch.device, group_sizes: tuple[int, ...] = (), state_rows: int = 0
) -> MemoryManager:
    memory = MemoryManager(SIZE, layout, device, group_sizes, state_rows)
    states = (rows for group in memory.state_buffers for rows in group)
    for buffer in (*memory.buffers, *memory.scale_buffers.values(), *states):
        words = buffer.view(torch.uint8)
        words.copy_(torch.randint(0, 256, words.shape, dtype=torch.uint8, device="cpu"))
    return memory


def tokens_of(memory: MemoryManager, slots: torch.Tensor) -> list[torch.Tensor]:
    buffers = (*memory.buffers, *memory.scale_buffers.values())
    return [buffer.view(torch.uint8)[:, slots.to(buffer.device)].cpu() for buffer in buffers]


def check_round_trip(layout: KvLayout, device_name: str) -> None:
    """Two blocks down, their slots and all others overwritten, and the blocks up into other slots."""
    platform = pick_device(device_name)
    device = platform.torch_device(0)
    memory = filled(layout, device)
    tier = CpuOffload(memory, [NUM_BLOCKS], platform, device)
    order = torch.randperm(SIZE)
    source, target = order[: 2 * BLOCK_TOKENS], order[2 * BLOCK_TOKENS : 4 * BLOCK_TOKENS]
    others = order[4 * BLOCK_TOKENS :]
    expected, untouched = tokens_of(memory, source), tokens_of(memory, others)

    tier.store(KvStore(source.int().numpy(), [2, 0]))
    for buffer in (*memory.buffers, *memory.scale_buffers.values()):
        buffer.view(torch.uint8)[:, source.to(device)] = 0  # as the next step does, on the same stream
    tier.start_load(KvLoad(7, [2, 0], target.int().numpy()))
    loaded = tier.wait(7)

    assert loaded.is_valid
    assert loaded.seconds > 0
    for found, wanted in zip(tokens_of(memory, target), expected, strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip(tokens_of(memory, others), untouched, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_kv_comes_back_as_it_was(name: str) -> None:
    check_round_trip(LAYOUTS[name], "cpu")


def test_what_else_is_known_of_tokens_comes_back_with_their_kv() -> None:
    memory = filled(LAYOUTS["bfloat16"], torch.device("cpu"))
    choices = torch.randint(0, 200, (SIZE + 1, 3, 5), dtype=torch.uint8)
    memory.token_buffers.append(choices)
    (block_format,) = block_formats(memory, BLOCK_TOKENS)
    order = torch.randperm(SIZE)
    source, target = order[: 2 * BLOCK_TOKENS], order[2 * BLOCK_TOKENS : 4 * BLOCK_TOKENS]
    blocks = torch.zeros(2, block_format.num_bytes, dtype=torch.uint8)
    expected, kv = choices[source].clone(), tokens_of(memory, source)

    block_format.gather(source.view(2, -1), blocks)
    block_format.scatter(blocks, target.view(2, -1))

    assert torch.equal(choices[target], expected)
    assert all(map(torch.equal, tokens_of(memory, target), kv))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_random_kv_comes_back_from_pinned_memory_as_it_was(name: str) -> None:
    check_round_trip(LAYOUTS[name], "cuda")


@pytest.mark.gpu
def test_more_copies_down_than_the_ring_has_places_and_a_busy_stream() -> None:
    platform = pick_device("cuda")
    device = platform.torch_device(0)
    memory = MemoryManager(64 * BLOCK_TOKENS, LAYOUTS["bfloat16"], device)
    (buffer,) = memory.buffers
    buffer.copy_(torch.randn(buffer.shape))
    tier = CpuOffload(memory, [64], platform, device)
    expected = buffer[:, :-1].cpu()
    slots = torch.arange(64 * BLOCK_TOKENS).int().numpy()
    square = torch.randn(4096, 4096, device=device)
    for _ in range(50):  # work in front, so that the copies wait
        square = square @ square

    tier.store(KvStore(slots, list(range(64))))
    buffer.zero_()
    tier.start_load(KvLoad(0, list(range(64)), slots))

    assert tier.wait(0).is_valid
    assert torch.equal(buffer[:, :-1].cpu(), expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bytes_of_a_block_follow_from_the_layout(name: str) -> None:
    layout = LAYOUTS[name]
    (block,) = block_formats(filled(layout, torch.device("cpu")), BLOCK_TOKENS)

    assert block.num_bytes == block_bytes(layout, BLOCK_TOKENS)
    assert layout.bytes_per_token * BLOCK_TOKENS <= block.num_bytes < layout.bytes_per_token * BLOCK_TOKENS + 64
    assert block._sections[-1].end <= block.num_bytes
