"""Tiny models of the families that read images, their processors, and what transformers computes with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from test.torchvision_free import load_processor

VOCAB_SIZE = 131
START, PAD, END = VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 2
HIDDEN = 48
GEMMA3_TOKENS = 9
LLAMA4_TOKENS = AYA_TOKENS = 4  # of a square
GRIDS = ("internvl", "aya_vision", "cohere2_vision")  # of squares, whose processors count them
COLORS = {"image_mean": [0.48, 0.45, 0.4], "image_std": [0.26, 0.26, 0.27]}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE + 5,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 4000,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
SQUARE = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 32,
}
CLIP = {"model_type": "clip_vision_model", **SQUARE}
SIGLIP = {"model_type": "siglip_vision_model", **SQUARE, "vision_use_head": False}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 96,
    "hidden_act": "silu",
}
GLM_PATCH = 14
GLM_ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5, "rope_theta": 1e4}
GLM_TEXT: dict[str, Any] = {
    **TEXT,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "rope_parameters": GLM_ROPE,
}
GLM_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": HIDDEN,
    "num_heads": 2,
    "intermediate_size": 40,
    "image_size": 84,
}
KIMI_VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
}
GEMMA4_TEXT: dict[str, Any] = {
    **TEXT,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 16,
    "global_head_dim": 24,
    "pad_token_id": 3,
    "vocab_size_per_layer_input": VOCAB_SIZE + 5,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "patch_size": 8,
    "pooling_kernel_size": 2,
    "position_embedding_size": 160,
}
TEMPLATE = (
    "{% for message in messages %}w1 {% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}MARKER {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}w2"
)


@dataclass(frozen=True)
class VisionFamily:
    model_type: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    files: Mapping[str, Any]  # preprocessor_config.json
    processor: Callable[..., Any]
    marker: str = "<image>"  # what the chat template writes for an image
    special: tuple[str, str, str] = ("<begin>", "<image>", "<end>")  # the texts of START, PAD and END
    fields: Mapping[str, Any] = field(default_factory=dict)  # of config.json
    pixel_error: float = 2e-6  # of the processor

    def tiles(self, images: Sequence[Image.Image]) -> list[Tensor]:
        """The values that the tower of transformers gets, ``[height, width, 3]`` each."""
        values = self.processed(images)
        pixels = values["pixel_values"].float()
        if "image_grid_thw" in values:
            counts = values["image_grid_thw"].prod(-1).tolist()
            grids = values["image_grid_thw"][:, 1:].tolist()
            of_images = zip(pixels.split_with_sizes(counts), grids, strict=True)
            if self.model_type == "kimi_k25":  # patches have the colors first
                return [
                    _assembled(each.permute(0, 2, 3, 1), grid, self.files["patch_size"]) for each, grid in of_images
                ]
            return [_merged(*of_image) for of_image in of_images]
        if "spatial_shapes" in values:
            grids = [grid.tolist() for grid in values["spatial_shapes"]]
            patch = int(self.files["encoder_patch_size"])
            return [_assembled(patches, grid, patch) for patches, grid in zip(pixels, grids, strict=True)]
        if self.files.get("max_soft_tokens"):
            places, patch = values["image_position_ids"], int(self.files["patch_size"])
            grids = [(of_image.max(0).values + 1).flip(0).tolist() for of_image in places]
            return [_assembled(patches, grid, patch) for patches, grid in zip(pixels, grids, strict=True)]
        return list(pixels.flatten(0, -4).permute(0, 2, 3, 1))

    def processed(self, images: Sequence[Image.Image]) -> Any:
        """What the processor of transformers makes of the images of one request."""
        return self.processor(**self.files)([list(images)] if self.is_nested else list(images), return_tensors="pt")

    @property
    def is_nested(self) -> bool:
        return self.model_type == "llava_onevision"


def _assembled(patches: Tensor, grid: Sequence[int], patch: int) -> Tensor:
    """An image of its patches, ``[patches, patch * patch * 3]``, behind which padding may be."""
    rows, columns = grid
    squares = patches[: rows * columns].view(rows, columns, patch, patch, 3)
    return squares.transpose(1, 2).reshape(rows * patch, columns * patch, 3)


def _merged(patches: Tensor, grid: list[int]) -> Tensor:
    """An image of its patches in squares of four, ``[patches, 3 * frames * patch * patch]``."""
    rows, columns = (length // 2 for length in grid)
    squares = patches.view(rows, columns, 2, 2, 3, 2, GLM_PATCH, GLM_PATCH)[:, :, :, :, :, 0]
    return squares.permute(0, 2, 5, 1, 3, 6, 4).reshape(rows * 2 * GLM_PATCH, columns * 2 * GLM_PATCH, 3)


def _tensors(model: Any, values: Any) -> dict[str, Any]:
    """What the model takes of the output of a processor."""
    names = (
        *("pixel_values", "image_sizes", "batch_num_images", "image_position_ids", "image_grid_thw"),
        *("pixel_attention_mask", "spatial_shapes"),
    )
    inputs = {name: values[name] for name in names if name in values}
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].float()  # Llama 4 computes them in bfloat16
    if "batch_num_images" in inputs:
        inputs["batch_num_images"] = torch.as_tensor(inputs["batch_num_images"])
    return inputs


GEMMA3 = VisionFamily(
    "gemma3",
    {
        **TEXT,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 6,
        "query_pre_attn_scalar": 16,
    },
    {**SIGLIP, "image_size": 48},
    {**COLORS, "size": {"height": 48, "width": 48}},
    Gemma3ImageProcessorPil,
    "<start_of_image>",
    ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    {"mm_tokens_per_image": GEMMA3_TOKENS, "boi_token_index": START, "eoi_token_index": END},
)
GEMMA4 = VisionFamily(
    "gemma4",
    {
        **GEMMA4_TEXT,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 10,
    },
    {**GEMMA4_VISION, "use_clipped_linears": True},
    {"max_soft_tokens": 70, "patch_size": 8, "pooling_kernel_size": 2},
    Gemma4ImageProcessorPil,
    "<|image|>",
    ("<|image>", "<|image|>", "<image|>"),
    {"boi_token_id": START, "eoi_token_id": END},
)
GLM4V = VisionFamily(
    "glm4v",
    {"model_type": "glm4v_text", **GLM_TEXT},
    GLM_VISION,
    {**COLORS, "size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 28 * 28 * 40}},
    Glm4vImageProcessorPil,
    "<|image|>",
    ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
    {"image_start_token_id": START, "image_end_token_id": END},
)
AYA = VisionFamily(
    "aya_vision",
    {"model_type": "cohere2", **TEXT, "num_hidden_layers": 4, "sliding_window": 16},
    SIGLIP,
    {**COLORS, "size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 5},
    GotOcr2ImageProcessorPil,
    "<image>",
    ("<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|END_OF_IMG|>"),
    {"alignment_intermediate_size": 40},
)
FAMILIES = {
    "aya_vision": AYA,
    "cohere2_vision": replace(
        AYA,
        model_type="cohere2_vision",
        processor=load_processor("cohere2_vision", "Cohere2VisionImageProcessor"),
        marker="<|IMG_PATCH|>",
    ),
    "llava": VisionFamily(
        "llava",
        {"model_type": "llama", **TEXT},
        CLIP,
        {**COLORS, "size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        LlavaImageProcessorPil,
    ),
    "llava-two-layers": VisionFamily(
        "llava",
        {"model_type": "llama", **TEXT},
        CLIP,
        {**COLORS, "size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}, "do_pad": True},
        LlavaImageProcessorPil,
        fields={"vision_feature_layer": [1, -1], "vision_feature_select_strategy": "full"},
    ),
    "llava-siglip": VisionFamily(
        "llava",
        {"model_type": "mistral", **TEXT, "sliding_window": None},
        SIGLIP,
        {**COLORS, "size": {"height": 32, "width": 32}, "do_center_crop": False},
        LlavaImageProcessorPil,
        fields={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "llava_next": VisionFamily(
        "llava_next",
        {"model_type": "mistral", **TEXT, "sliding_window": None},
        CLIP,
        {
            **COLORS,
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]],
        },
        LlavaNextImageProcessorPil,
        fields={"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]},
    ),
    "llava_onevision": VisionFamily(
        "llava_onevision",
        {"model_type": "qwen2", **TEXT},
        {**SIGLIP, "image_size": 34},
        {
            **COLORS,
            "size": {"height": 34, "width": 34},
            "image_grid_pinpoints": [[34 * rows, 34 * columns] for rows in range(1, 5) for columns in range(1, 5)],
        },
        LlavaOnevisionImageProcessorPil,
        fields={
            "vision_aspect_ratio": "anyres_max_3",
            "image_grid_pinpoints": [[34 * rows, 34 * columns] for rows in range(1, 5) for columns in range(1, 5)],
        },
    ),
    "internvl": VisionFamily(
        "internvl",
        {"model_type": "qwen2", **TEXT},
        {
            **SQUARE,
            "model_type": "internvl_vision",
            "image_size": [32, 32],
            "patch_size": [8, 8],
            "attention_bias": True,
        },
        {**COLORS, "size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 5},
        GotOcr2ImageProcessorPil,
        "<IMG_CONTEXT>",
        ("<img>", "<IMG_CONTEXT>", "</img>"),
        {"image_seq_length": 4, "tie_word_embeddings": False},
    ),
    "internvl-6b": VisionFamily(
        "internvl",
        {"model_type": "qwen3", **TEXT},
        {
            **SQUARE,
            "model_type": "internvl_vision",
            "image_size": [32, 32],
            "patch_size": [8, 8],
            "use_qk_norm": True,
            "norm_type": "rms_norm",
            "use_mean_pooling": False,
        },
        {**COLORS, "size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 12},
        GotOcr2ImageProcessorPil,
        "<IMG_CONTEXT>",
        ("<img>", "<IMG_CONTEXT>", "</img>"),
        {"image_seq_length": 4, "tie_word_embeddings": False},
    ),
    "gemma3": GEMMA3,
    "gemma3-crops": replace(
        GEMMA3,
        files={
            **GEMMA3.files,
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 40,
            "pan_and_scan_max_num_crops": 3,
            "pan_and_scan_min_ratio_to_activate": 1.5,
        },
    ),
    "gemma4": GEMMA4,
    "gemma4-experts": replace(
        GEMMA4,
        text={
            **GEMMA4_TEXT,
            "use_bidirectional_attention": "vision",
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 20,
        },
        vision={**GEMMA4_VISION, "standardize": True, "num_key_value_heads": 1},
    ),
    "gemma4_unified": replace(
        GEMMA4,
        model_type="gemma4_unified",
        text={
            **{key: value for key, value in GEMMA4_TEXT.items() if not key.endswith("per_layer_input")},
            "use_bidirectional_attention": "vision",
            "attention_k_eq_v": True,
        },
        vision={
            "patch_size": 8,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 32,
            "mm_posemb_size": 70,
            "output_proj_dims": 32,
        },
        # transformers' own processor needs torchvision; it puts squares of 2 x 2 patches together after this one
        files={"max_soft_tokens": 70, "patch_size": 16, "pooling_kernel_size": 1},
    ),
    "glm4v": GLM4V,
    "glm4v_moe": replace(
        GLM4V,
        model_type="glm4v_moe",
        text={
            "model_type": "glm4v_moe_text",
            **GLM_TEXT,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        vision={**GLM_VISION, "attention_bias": True},
    ),
    "glm46v": replace(
        GLM4V, model_type="glm46v", vision={"model_type": "glm4v_vision", **GLM_VISION, "patch_size": GLM_PATCH}
    ),
    "paligemma": VisionFamily(
        "paligemma",
        {"model_type": "gemma", **TEXT},
        {**SIGLIP, "projection_dim": HIDDEN},
        {**COLORS, "size": {"height": 32, "width": 32}},
        SiglipImageProcessorPil,
        fields={"projection_dim": HIDDEN},
    ),
    "paligemma2": VisionFamily(
        "paligemma",
        {"model_type": "gemma2", **TEXT, "sliding_window": 200, "query_pre_attn_scalar": 16},
        {**SIGLIP, "projection_dim": HIDDEN},
        {**COLORS, "size": {"height": 32, "width": 32}},
        SiglipImageProcessorPil,
        fields={"projection_dim": HIDDEN},
    ),
    "kimi_k25": VisionFamily(
        "kimi_k25",
        {
            **{key: value for key, value in TEXT.items() if key != "head_dim"},
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "kv_lora_rank": 20,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 8,
            "v_head_dim": 14,
            "moe_intermediate_size": 28,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        {**KIMI_VISION, "pos_emb_height": 5, "pos_emb_width": 5},
        {**COLORS, "patch_size": 8, "max_patches": 160, "size": {"max_height": 20, "max_width": 20}},
        load_processor("kimi_k25", "Kimi_K25ImageProcessor"),
        "<|media_pad|>",
        ("<|media_begin|>", "<|media_pad|>", "<|media_end|>"),
        {"projection_hidden_size": 32},
    ),
    "lfm2_vl": VisionFamily(
        "lfm2_vl",
        {
            **{key: value for key, value in TEXT.items() if key != "head_dim"},
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "block_multiple_of": 8,
        },
        {
            "model_type": "siglip2_vision_model",
            **{key: value for key, value in SQUARE.items() if key != "image_size"},
            "num_patches": 25,
            "vision_use_head": False,
        },
        {
            **COLORS,
            "encoder_patch_size": 8,
            "tile_size": 64,
            "min_image_tokens": 4,
            "max_image_tokens": 20,
            "max_tiles": 5,
            "resample": 2,
        },
        load_processor("lfm2_vl", "Lfm2VlImageProcessor"),
        special=("<|image_start|>", "<image>", "<|image_end|>"),
        fields={"projector_hidden_size": 40},
    ),
    "llama4": VisionFamily(
        "llama4",
        {
            **TEXT,
            "intermediate_size_mlp": 80,
            "num_local_experts": 4,
            "num_hidden_layers": 4,
            "attention_chunk_size": 30,
            "attn_temperature_tuning": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        {
            **SQUARE,
            "intermediate_size": 128,
            "vision_output_dim": 24,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
        },
        {**COLORS, "size": {"height": 32, "width": 32}, "max_patches": 5, "resample": 2},
        load_processor("llama4", "Llama4ImageProcessor"),
        "<|image|>",
        ("<|image_start|>", "<|patch|>", "<|image_end|>"),
        pixel_error=0.04,  # of bfloat16
    ),
    "mistral3": VisionFamily(
        "mistral3",
        {"model_type": "mistral", **TEXT, "sliding_window": None},
        PIXTRAL,
        {**COLORS, "size": {"longest_edge": 96}, "patch_size": {"height": 16, "width": 16}},
        PixtralImageProcessorPil,
        "[IMG]",
        ("[IMG_BREAK]", "[IMG]", "[IMG_END]"),
        {"spatial_merge_size": 2, "multimodal_projector_bias": False},
    ),
    "pixtral": VisionFamily(
        "llava",
        {"model_type": "mistral", **TEXT, "sliding_window": None},
        PIXTRAL,
        {**COLORS, "size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}},
        PixtralImageProcessorPil,
        "[IMG]",
        ("[IMG_BREAK]", "[IMG]", "[IMG_END]"),
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
}


def save_family(folder: Path, name: str) -> Any:
    """The model of transformers. A token is a word; w0 ends the text."""
    torch.manual_seed(5)
    family = FAMILIES[name]
    config = AutoConfig.for_model(
        family.model_type,
        **{
            "text_config": dict(family.text),
            "vision_config": dict(family.vision),
            "image_token_id": PAD,
            "tie_word_embeddings": False,
            **family.fields,
        },
    )
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    for weight_name, weight in model.state_dict().items():
        is_scale = ("norm" in weight_name or "scal" in weight_name) and "bias" not in weight_name
        weight.normal_(mean=float(is_scale), std=0.02 if "embed_tokens" in weight_name else 0.2)
        if weight_name.endswith(("_min", "_max")):  # of what a linear reads or computes
            weight.abs_().add_(1).mul_(-1 if weight_name.endswith("_min") else 1)
    with torch.no_grad():  # a text never has the tokens of images
        model.get_output_embeddings().weight[VOCAB_SIZE:] = 0
    model.save_pretrained(folder)
    if family.model_type == "kimi_k25":
        name_as_published(folder / "model.safetensors")
    save_tokenizer(folder, family)
    (folder / "preprocessor_config.json").write_text(json.dumps(family.files))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return model


def name_as_published(file: Path) -> None:
    """transformers 5.22 saves the layers of Kimi's language model under another name."""
    tensors = {name.replace("model.blocks.", "model.layers."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def save_tokenizer(folder: Path, family: VisionFamily) -> None:
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # words with spaces between them
    backend.add_special_tokens([AddedToken(text, special=True) for text in family.special])
    backend.save(str(folder / "tokenizer.json"))
    values: dict[str, Any] = {"bos_token": family.special[0]}
    if family.model_type != "paligemma":  # whose template is built in
        values["chat_template"] = TEMPLATE.replace("MARKER", family.marker)
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def features(model: Any, name: str, images: Sequence[Image.Image]) -> list[Tensor]:
    """The embeddings of each image of one request."""
    inputs = _tensors(model, FAMILIES[name].processed(images))
    if FAMILIES[name].model_type == "llama4":
        counts = [len(FAMILIES[name].tiles([image])) for image in images]
        with torch.no_grad():
            rows = model.multi_modal_projector(model.vision_model(**inputs).last_hidden_state)
        return [of_image.flatten(0, 1) for of_image in rows.split(counts)]
    with torch.no_grad():
        found = model.model.get_image_features(**inputs).pooler_output
    if FAMILIES[name].files.get("do_pan_and_scan"):
        counts = [1 + count for count in FAMILIES[name].processed(images)["num_crops"]]
        return [of_image.flatten(0, 1) for of_image in found.split(counts)]
    if FAMILIES[name].model_type in GRIDS:
        counts = torch.as_tensor(FAMILIES[name].processed(images)["num_patches"]).tolist()
        return [of_image.flatten(0, 1) for of_image in found.split(counts)]
    if FAMILIES[name].model_type == "lfm2_vl":
        counts = [sum(_runs(FAMILIES[name], image)) for image in images]
        return list(torch.cat(list(found)).split_with_sizes(counts))
    return list(found)


def _runs(family: VisionFamily, image: Image.Image) -> list[int]:
    """The tokens of each picture that LFM2-VL makes of an image."""
    counts: list[int] = (family.processed([image])["spatial_shapes"].prod(-1) // 4).tolist()
    return counts


def oracle_inputs(model: Any, name: str, prompt: Sequence[int], images: Sequence[Image.Image]) -> dict[str, Any]:
    """``prompt`` has PAD once for each image."""
    family = FAMILIES[name]
    if not images:
        return {"input_ids": torch.tensor([list(prompt)])}
    counts = iter([len(each) for each in features(model, name, images)])
    values = family.processed(images)
    sizes = iter(values.get("image_sizes", images))
    ids: list[int] = []
    for token_id in prompt:
        ids += image_ids(family, next(counts), next(sizes)) if token_id == PAD else [token_id]
    return {"input_ids": torch.tensor([ids]), **_tensors(model, values)}


def image_ids(family: VisionFamily, count: int, size: Any) -> list[int]:
    """What stands for an image in a prompt."""
    if family.model_type == "gemma3":
        square = [START, *[PAD] * GEMMA3_TOKENS, END]
        words = count > GEMMA3_TOKENS, 5 * [0], 10 * [0]  # "Here is the original image", "and here are some crops ..."
        return [*words[1], *square, *words[2], *square * (count // GEMMA3_TOKENS - 1)] if words[0] else square
    if family.model_type in ("internvl", "gemma4", "gemma4_unified"):
        return [START, *[PAD] * count, END]
    if family.model_type == "llama4":
        tile = [PAD] * LLAMA4_TOKENS
        squares = count // LLAMA4_TOKENS - 1
        return [START, *([*tile, 0] * squares or [0]), *tile, END]
    if family.model_type in ("aya_vision", "cohere2_vision"):
        tile = [PAD] * AYA_TOKENS
        with_text = [0, *tile] if family.model_type == "aya_vision" else [*tile, 0]
        return [START, *with_text * (count // AYA_TOKENS), END]
    if family.model_type == "lfm2_vl":
        runs = [[PAD] * run for run in _runs(family, size)]
        return [START, *(runs[0] if len(runs) == 1 else [token_id for run in runs for token_id in [0, *run]]), END]
    if family.vision.get("model_type") == "pixtral":
        columns = int(size[1]) // family.files["patch_size"]["width"]
        row = [*[PAD] * columns, START]
        return [*row * (count // columns - 1), *[PAD] * columns, END]
    return [PAD] * count


def greedy(model: Any, name: str, prompt: Sequence[int], images: Sequence[Image.Image], count: int) -> list[int]:
    """The likeliest continuation, computed from scratch for each token."""
    inputs = oracle_inputs(model, name, prompt, images)
    ids = inputs["input_ids"]
    length = ids.shape[1]
    with torch.inference_mode():
        for _ in range(count):
            types = _token_types(model, ids, length)
            logits = model(**{**inputs, **types, "input_ids": ids}).logits
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=1)
    out: list[int] = ids[0, length:].tolist()
    return out


def _token_types(model: Any, ids: Tensor, prompt_len: int) -> dict[str, Any]:
    """Gemma 3 and 4: 1 for tokens of images. PaliGemma: 1 behind the prompt."""
    model_type = model.config.model_type
    if model_type == "gemma4" or model_type.startswith("glm4"):
        return {"mm_token_type_ids": (ids == PAD).long()}
    if model_type == "gemma4_unified":  # whose forward has masks of Gemma 3, but those of Gemma 4 for `generate`
        shape, types = torch.empty(*ids.shape, 0), (ids == PAD).long()
        masks = model.create_masks_for_generate(model.config, shape, None, None, None, mm_token_type_ids=types)
        return {"attention_mask": masks}
    if model_type == "gemma3":
        return {"token_type_ids": (ids == PAD).long()}
    if model_type == "paligemma":
        return {"token_type_ids": (torch.arange(ids.shape[1]) >= prompt_len).long()[None]}
    return {}
