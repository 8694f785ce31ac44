from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from lightserve.common.checkpoint.gguf import gguf_metadata
from lightserve.common.checkpoint.gguf_blocks import CHUNK
from lightserve.common.checkpoint.reader import open_checkpoint, total_bytes
from lightserve.errors import CheckpointError, ModelFilesError
from lightserve.model_files import resolve
from lightserve.model_files.source import GgufSource
from test.model_files.files import finish, save_as_gguf, start_gguf, tiny_model
from test.real_model import smollm2, transformers_smollm2

# where in a block the float16 scales are: they must be finite, all other bytes may be random
SCALES: dict[str, list[int]] = {
    "F32": [],
    "F16": [],
    "BF16": [],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "MXFP4": [],
}
EXPONENTS = {"MXFP4": (119, 124)}  # in a byte before the others: any would be beyond float32


def random_blocks(encoding: str, n_rows: int, n_cols: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    generator = np.random.default_rng(0)
    block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[encoding]]
    if encoding in ("F32", "F16", "BF16"):
        numbers = generator.standard_normal((n_rows, n_cols), dtype=np.float32)
        return np.ascontiguousarray(gguf.quants.quantize(numbers, GGMLQuantizationType[encoding])).view(np.uint8)
    blocks = generator.integers(0, 256, (n_rows * n_cols // block, n_bytes), dtype=np.uint8)
    for at in SCALES[encoding]:
        scales = generator.standard_normal((len(blocks), 1), dtype=np.float32).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    if encoding in EXPONENTS:
        blocks[:, 0] = generator.integers(*EXPONENTS[encoding], len(blocks), dtype=np.uint8)
    return blocks.reshape(n_rows, -1)


def save_embedding(
    path: Path, encoding: GGMLQuantizationType, raw: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
) -> Path:
    writer = start_gguf(path, "llama", tiny_model("llama").config)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=encoding)
    return finish(writer, path)


@pytest.mark.parametrize("encoding", SCALES)
@pytest.mark.parametrize("n_rows", [1, 7, CHUNK // 256 + 3], ids=["one row", "odd", "over a chunk"])
def test_every_encoding_decodes_as_the_gguf_package_does(encoding: str, n_rows: int, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[encoding]
    raw = random_blocks(encoding, n_rows, 256)
    path = save_embedding(tmp_path / "model.gguf", kind, raw)

    (found,) = open_checkpoint(resolve(str(path)))

    expected = gguf.quants.dequantize(gguf.GGUFReader(path).tensors[0].data, kind)
    assert found.name == "model.embed_tokens.weight"
    assert found.file == str(path)
    assert found.tensor.dtype == torch.float32
    torch.testing.assert_close(found.tensor, torch.from_numpy(np.array(expected)), rtol=0, atol=0)


@pytest.mark.parametrize("model_type", ["bloom", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_a_model_comes_back_from_gguf_as_transformers_had_it(model_type: str, is_tied: bool, tmp_path: Path) -> None:
    if model_type == "bloom" and not is_tied:
        pytest.skip("Bloom has no head of its own")
    model = tiny_model(model_type, tie_word_embeddings=is_tied)
    source = resolve(str(save_as_gguf(model, tmp_path / "model.gguf")))

    found = {name: tensor for name, tensor, _ in open_checkpoint(source)}

    expected = dict(model.state_dict())
    if is_tied:
        del expected["lm_head.weight"]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)
    assert total_bytes(source) == sum(tensor.nbytes for tensor in found.values())


def test_a_copied_bloom_head_is_skipped(tmp_path: Path) -> None:
    model = tiny_model("bloom")
    copy = model.state_dict()["lm_head.weight"].numpy()
    source = resolve(str(save_as_gguf(model, tmp_path / "model.gguf", {"output.weight": copy})))

    assert "lm_head.weight" not in {name for name, _, _ in open_checkpoint(source)}


def test_rotary_factors_are_not_a_weight(tmp_path: Path) -> None:
    ones = np.ones(8, dtype=np.float32)
    source = resolve(str(save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf", {"rope_freqs.weight": ones})))

    assert not [name for name, _, _ in open_checkpoint(source) if "rope" in name]


def test_a_tensor_no_model_has_is_named_with_its_file(tmp_path: Path) -> None:
    ones = np.ones(8, dtype=np.float32)
    path = save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf", {"blk.0.ssm_conv.weight": ones})

    with pytest.raises(CheckpointError, match=r"model.gguf: tensor blk.0.ssm_conv.weight belongs to no llama model"):
        list(open_checkpoint(resolve(str(path))))


def test_an_unsupported_encoding_is_named_with_tensor_and_file(tmp_path: Path) -> None:
    raw = np.zeros((4, GGML_QUANT_SIZES[GGMLQuantizationType.IQ2_XXS][1]), dtype=np.uint8)
    path = save_embedding(tmp_path / "model.gguf", GGMLQuantizationType.IQ2_XXS, raw)

    with pytest.raises(
        ModelFilesError, match=r"model.gguf: tensor token_embd.weight has type IQ2_XXS; supported.*llama-quantize"
    ):
        resolve(str(path))


def test_rows_that_the_heads_do_not_divide_are_refused(tmp_path: Path) -> None:
    source = resolve(str(save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf")))
    assert isinstance(source, GgufSource)

    with pytest.raises(CheckpointError, match=r"tensor blk.0.attn_k.weight has 32 rows, no multiple of 6; convert it"):
        list(gguf_metadata(source.header, source.hf_config() | {"num_key_value_heads": 3}))


@pytest.mark.slow
def test_the_default_models_weights_are_those_transformers_reads() -> None:
    source = smollm2()
    expected = dict(transformers_smollm2().state_dict())
    del expected["lm_head.weight"]  # tied

    for name, tensor, _ in open_checkpoint(source):
        assert torch.equal(tensor, expected.pop(name)), name

    assert not expected
