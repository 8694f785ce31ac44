"""A KvLayout decides shapes and bytes of the KV cache; the MemoryManager allocates it."""

from __future__ import annotations

import pytest
import torch

from lightserve.common.kv.layout import KvContent, KvGroup, KvLayout, StateGroup, StateTensor
from lightserve.common.kv.mem_manager import MemoryManager

CPU = torch.device("cpu")
BF16 = torch.bfloat16
MIXED = KvLayout(
    (
        KvGroup((0, 2), num_heads=4, key_size=16, value_size=16, dtype=BF16, window=8),
        KvGroup((1,), num_heads=2, key_size=24, value_size=16, dtype=torch.float32),
        KvGroup((3, 4), num_heads=1, key_size=72, value_size=0, dtype=BF16),
        KvGroup((5,), num_heads=2, key_size=16, value_size=16, dtype=torch.int8, scale_dtype=torch.float32),
    )
)
RECURRENT = KvLayout(
    (KvGroup((1, 3), num_heads=2, key_size=16, value_size=16, dtype=BF16),),
    (
        StateGroup((0, 3), (StateTensor((3, 24), BF16), StateTensor((2, 8, 4), torch.float32))),
        StateGroup((2,), (StateTensor((2, 16), BF16),)),
    ),
)


def test_plain_keys_and_values_are_one_buffer_with_keys_first() -> None:
    manager = MemoryManager(10, KvLayout.uniform(3, num_heads=2, head_dim=16, dtype=BF16), CPU)

    (buffer,) = manager.buffers
    assert buffer.shape == (3, 11, 4, 16)
    assert buffer.dtype == BF16
    assert manager.padding_slot == 10
    assert [manager.layer(i).data_ptr() for i in range(3)] == [buffer[i].data_ptr() for i in range(3)]
    assert manager.scales(0) is None


def test_layers_may_differ_in_heads_sizes_types_and_scales() -> None:
    manager = MemoryManager(10, MIXED, CPU)

    shapes = [tuple(manager.layer(i).shape) for i in range(6)]

    assert shapes == [(11, 8, 16), (11, 2, 40), (11, 8, 16), (11, 1, 72), (11, 1, 72), (11, 4, 16)]
    assert [manager.layer(i).dtype for i in (1, 5)] == [torch.float32, torch.int8]
    scales = manager.scales(5)
    assert scales is not None
    assert scales.shape == (11, 4)
    assert manager.scales(1) is None


def test_bytes_per_token_are_those_of_the_buffers() -> None:
    manager = MemoryManager(10, MIXED, CPU)

    buffers = [*manager.buffers, *manager.scale_buffers.values()]

    assert MIXED.bytes_per_token * 11 == sum(buffer.nbytes for buffer in buffers)
    llama_3_8b = KvLayout.uniform(32, num_heads=8, head_dim=128, dtype=BF16)
    assert llama_3_8b.bytes_per_token == 131_072


def test_layers_share_a_plan_when_their_attention_is_the_same() -> None:
    groups = [MIXED.group_of(i) for i in range(6)]

    keys = [group.plan_key for group in groups if group is not None]

    assert len(keys) == 6
    assert keys[0] == keys[2]
    assert len(set(keys)) == 4


@pytest.mark.parametrize("layers", [((0, 1), (1,)), ((2, 2),)])
def test_a_layer_in_two_groups_is_refused(layers: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="a layer is in one KV group only"):
        KvLayout(tuple(KvGroup(group, 1, 8, 8, BF16) for group in layers))


def test_layers_without_a_cache_take_no_memory() -> None:
    layout = KvLayout((KvGroup((5, 7), 1, 8, 8, BF16),))
    manager = MemoryManager(4, layout, CPU)

    assert layout.group_of(6) is None
    assert layout.num_layers == 2
    assert manager.buffers[0].shape == (2, 5, 2, 8)
    assert manager.layer(7).data_ptr() == manager.buffers[0][1].data_ptr()


def test_recurrent_layers_store_rows_of_their_shapes() -> None:
    manager = MemoryManager(4, RECURRENT, CPU, state_rows=5)

    inputs, matrices = manager.states(3)

    assert (inputs.shape, inputs.dtype) == ((6, 3, 24), BF16)
    assert (matrices.shape, matrices.dtype) == ((6, 2, 8, 4), torch.float32)
    assert [state.shape for state in manager.states(2)] == [(6, 2, 16)]
    assert (manager.state_rows, manager.padding_row) == (5, 5)


def test_every_recurrent_layer_has_its_own_memory() -> None:
    manager = MemoryManager(4, RECURRENT, CPU, state_rows=5)

    for layer in (0, 2, 3):
        for state in manager.states(layer):
            state.fill_(layer)

    assert all(bool((state == layer).all()) for layer in (0, 2, 3) for state in manager.states(layer))


def test_bytes_per_state_row_are_those_of_the_buffers() -> None:
    manager = MemoryManager(4, RECURRENT, CPU, state_rows=5)

    buffers = [buffer for group in manager.state_buffers for buffer in group]

    assert RECURRENT.bytes_per_state_row * 6 == sum(buffer.nbytes for buffer in buffers)
    assert MIXED.bytes_per_state_row == 0


def test_a_pipeline_stage_has_the_states_of_its_layers() -> None:
    stage = RECURRENT.of_layers((2, 3))

    assert [group.layers for group in stage.groups] == [(3,)]
    assert [group.layers for group in stage.states] == [(3,), (2,)]
    assert stage.bytes_per_state_row == (3 * 24 * 2 + 2 * 8 * 4 * 4) + 2 * 16 * 2


def test_a_layer_in_two_state_groups_is_refused() -> None:
    group = StateGroup((0,), (StateTensor((4,), BF16),))

    with pytest.raises(ValueError, match="a layer is in one state group only"):
        KvLayout((), (group, group))


def test_a_state_without_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="a state needs a shape of positive sizes"):
        StateTensor((3, 0), BF16)


SHARED = KvLayout((KvGroup((0, 2), 1, 8, 8, BF16, window=4), KvGroup((1,), 2, 8, 8, BF16)), readers=((3, 1), (4, 2)))


@pytest.mark.parametrize("group_sizes", [(), (6,)])
def test_a_layer_that_reads_the_cache_of_another_takes_no_memory(group_sizes: tuple[int, ...]) -> None:
    manager = MemoryManager(4, SHARED, CPU, group_sizes)

    assert [buffer.shape[0] for buffer in manager.buffers] == [2, 1]
    assert [manager.layer(layer).data_ptr() for layer in (3, 4)] == [manager.layer(i).data_ptr() for i in (1, 2)]
    assert [manager.pool_of(layer) for layer in (3, 4)] == [manager.pool_of(layer) for layer in (1, 2)]
    assert [SHARED.group_of(layer) for layer in (3, 4)] == list(reversed(SHARED.groups))
    assert SHARED.num_layers == 3


def test_a_reader_has_the_scales_of_its_source() -> None:
    group = KvGroup((0,), 1, 8, 8, torch.int8, torch.float32)

    manager = MemoryManager(4, KvLayout((group,), readers=((1, 0),)), CPU)

    scales = [manager.scales(layer) for layer in (0, 1)]
    assert scales[0] is not None
    assert scales[0] is scales[1]


def test_a_part_of_the_layers_keeps_its_readers() -> None:
    assert SHARED.of_layers([0, 2, 4]).readers == ((4, 2),)
    with pytest.raises(ValueError, match=r"layer 3 cannot read the KV of layer 1; layers with KV: \[0, 2\]"):
        SHARED.of_layers([0, 2, 3])


@pytest.mark.parametrize("pair", [(0, 1), (3, 5)])
def test_a_reader_without_a_source_is_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"layer {pair[0]} cannot read the KV of layer {pair[1]}"):
        KvLayout(SHARED.groups, readers=(pair,))


LATENTS = KvGroup((0, 1, 2), num_heads=1, key_size=72, value_size=0, dtype=BF16)
INDEXED = KvLayout(
    (LATENTS, KvGroup((0, 2), num_heads=1, key_size=16, value_size=0, dtype=BF16, content=KvContent.INDEX_KEYS))
)


def test_keys_that_choose_tokens_are_stored_beside_the_latents() -> None:
    manager = MemoryManager(4, INDEXED, CPU)

    assert [manager.layer(layer).shape for layer in range(3)] == [(5, 1, 72)] * 3
    assert [manager.index_keys(layer).shape for layer in (0, 2)] == [(5, 1, 16)] * 2
    assert manager.index_keys(2).data_ptr() == manager.buffers[1][1].data_ptr()
    assert [INDEXED.group_of(layer) for layer in range(3)] == [LATENTS] * 3
    assert INDEXED.num_layers == 3
    assert INDEXED.bytes_per_token == (3 * 72 + 2 * 16) * 2


def test_a_part_of_the_layers_keeps_its_keys_that_choose_tokens() -> None:
    assert [group.layers for group in INDEXED.of_layers([1, 2]).groups_of(KvContent.INDEX_KEYS)] == [(2,)]


@pytest.mark.parametrize(
    ("layers", "message"),
    [((0, 0), "a layer is in one index keys group only"), ((3,), "layers with index keys need KV")],
)
def test_keys_that_choose_tokens_of_no_layer_are_refused(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KvLayout((LATENTS, KvGroup(layers, 1, 16, 0, BF16, content=KvContent.INDEX_KEYS)))


def test_key_parts_of_quantised_latents_are_stored_beside_them() -> None:
    layout = KvLayout.latents((0, 2), (64, 8), "int8", BF16)
    manager = MemoryManager(4, layout, CPU)

    scales, key_parts = manager.scales(2), manager.key_parts(2)

    assert scales is not None
    assert key_parts is not None
    assert (manager.layer(2).shape, manager.layer(2).dtype) == ((5, 1, 64), torch.int8)
    assert (scales.shape, scales.dtype) == ((5, 1), torch.float32)
    assert (key_parts.shape, key_parts.dtype) == ((5, 1, 8), BF16)
    assert layout.bytes_per_token == 2 * (64 + 4 + 8 * 2)
    assert layout.num_layers == 2


def test_latents_that_are_not_quantised_have_their_key_parts_behind_them() -> None:
    layout = KvLayout.latents((0, 2), (64, 8), None, BF16)

    assert layout.groups == (KvGroup((0, 2), 1, 72, 0, BF16),)
    assert MemoryManager(4, layout, CPU).key_parts(2) is None


def test_released_memory_is_taken_again_by_the_same_tensors() -> None:
    manager = MemoryManager(4, RECURRENT, CPU, state_rows=5)
    layers = [manager.layer(layer) for group in RECURRENT.groups for layer in group.layers]
    storages = [
        tensor.untyped_storage() for tensor in (*manager.buffers, *(t for ts in manager.state_buffers for t in ts))
    ]
    before = [storage.nbytes() for storage in storages]

    manager.release()
    assert [storage.nbytes() for storage in storages] == [0] * len(before)
    manager.restore()

    assert [storage.nbytes() for storage in storages] == before
    for layer in layers:
        layer.fill_(1)
    assert all(bool((buffer == 1).all()) for buffer in manager.buffers)
