"""What the files of a model say about the images or sounds that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightserve.errors import ModelFilesError
from lightserve.messages.media import Sight
from lightserve.model_files.config.names import with_common_names
from lightserve.model_files.folder import read_json
from lightserve.model_files.source import FolderSource, ModelSource

PREPROCESSOR = "preprocessor_config.json"
VIDEO_PREPROCESSOR = "video_preprocessor_config.json"
PROCESSOR = "processor_config.json"  # which has the others in newer files of transformers


class VisionFamily(NamedTuple):
    """The classes of models whose images or sounds are read, as ``module:name``."""

    layout: str  # an ImageLayout
    tower: str  # a VisionTower
    sight: Sight = Sight.NONE  # of the tokens of prompts
    reads_sounds: bool = False  # and no images
    sees_if_stated: bool = False  # the sight is that of models whose use_bidirectional_attention is "vision"


_LLAVA = VisionFamily("lightserve.media.layouts.square:LlavaImages", "lightserve.vision.families.square:LlavaTower")
_ANYRES = VisionFamily("lightserve.media.layouts.anyres:AnyresImages", "lightserve.vision.families.anyres:AnyresTower")
_GEMMA3 = VisionFamily(
    "lightserve.media.layouts.gemma3:Gemma3Images", "lightserve.vision.families.square:Gemma3Tower", Sight.IMAGE
)
_GEMMA4 = "lightserve.media.layouts.gemma4:Gemma4Images"
_GLM4V = VisionFamily("lightserve.media.layouts.glm4v:Glm4vImages", "lightserve.vision.families.glm4v:Glm4vTower")
_PALIGEMMA = VisionFamily(
    "lightserve.media.layouts.square:PaliGemmaImages", "lightserve.vision.families.square:PaliGemmaTower", Sight.PROMPT
)
_QWEN = VisionFamily("lightserve.media.layouts.qwen:QwenImages", "lightserve.vision.families.qwen:QwenTower")
_QWEN3 = VisionFamily("lightserve.media.layouts.qwen:QwenImages", "lightserve.vision.families.qwen3:Qwen3Tower")
_TILED = VisionFamily("lightserve.media.layouts.tiles:TiledImages", "lightserve.vision.families.idefics3:Idefics3Tower")
_AYA = "lightserve.vision.families.aya:AyaTower"
# by model_type of the whole model; of the others the language model is served
FAMILIES = {
    "aya_vision": VisionFamily("lightserve.media.layouts.aya:AyaImages", _AYA),
    "cohere2_vision": VisionFamily("lightserve.media.layouts.aya:CohereImages", _AYA),
    "gemma3": _GEMMA3,
    "gemma4": VisionFamily(_GEMMA4, "lightserve.vision.families.gemma4:Gemma4Tower", Sight.IMAGE, sees_if_stated=True),
    "gemma4_unified": VisionFamily(
        _GEMMA4, "lightserve.vision.families.gemma4_unified:Gemma4UnifiedTower", Sight.IMAGE, sees_if_stated=True
    ),
    "glm46v": _GLM4V,
    "glm4v": _GLM4V,
    "glm4v_moe": _GLM4V,
    "idefics3": _TILED,
    "internvl": VisionFamily(
        "lightserve.media.layouts.internvl:InternVLImages", "lightserve.vision.families.internvl:InternVLTower"
    ),
    "kimi_k25": VisionFamily(
        "lightserve.media.layouts.kimi_k25:KimiImages", "lightserve.vision.families.kimi_k25:KimiTower"
    ),
    "lfm2_vl": VisionFamily(
        "lightserve.media.layouts.lfm2_vl:Lfm2VlImages", "lightserve.vision.families.lfm2_vl:Lfm2VlTower"
    ),
    "llama4": VisionFamily(
        "lightserve.media.layouts.llama4:Llama4Images", "lightserve.vision.families.llama4:Llama4Tower"
    ),
    "llava": _LLAVA,
    "llava_next": _ANYRES,
    "llava_onevision": _ANYRES,
    "mistral3": VisionFamily(
        "lightserve.media.layouts.pixtral:PixtralImages", "lightserve.vision.families.pixtral:PixtralTower"
    ),
    "paligemma": _PALIGEMMA,
    "qwen2_5_vl": _QWEN,
    "qwen2_audio": VisionFamily(
        "lightserve.media.audio.qwen2_audio:Qwen2AudioSounds",
        "lightserve.audio.qwen2_audio:Qwen2AudioTower",
        reads_sounds=True,
    ),
    "qwen2_vl": _QWEN,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "smolvlm": _TILED,
}


@dataclass(frozen=True, slots=True)
class ImageFiles:
    model_type: str  # of the whole model
    preprocessor: Mapping[str, Any]  # preprocessor_config.json
    hf: Mapping[str, Any]  # config.json
    video: Mapping[str, Any] = field(default_factory=dict)  # video_preprocessor_config.json

    @property
    def family(self) -> VisionFamily:
        return FAMILIES[self.model_type]

    @property
    def vision(self) -> Mapping[str, Any]:
        return self._part("vision_config")

    @property
    def audio(self) -> Mapping[str, Any]:
        return self._part("audio_config")

    def _part(self, name: str) -> Mapping[str, Any]:
        config = self.hf.get(name)
        if not isinstance(config, dict):
            raise ModelFilesError(f"config.json has no {name}; fetch it again")
        return config

    def check_gelu_tanh(self) -> None:
        """Of vision towers that have no other activation."""
        act = self.vision.get("hidden_act", "gelu_pytorch_tanh")
        if act != "gelu_pytorch_tanh":
            raise ModelFilesError(
                f"config.json: hidden_act {act!r} of vision_config is not supported: gelu_pytorch_tanh"
            )

    @property
    def text_size(self) -> int:
        """Of the hidden states of the language model."""
        size: int = with_common_names(self.hf)["hidden_size"]
        return size

    def colors(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each color."""
        mean, std = self.preprocessor.get("image_mean"), self.preprocessor.get("image_std")
        if not mean or not std:
            raise ModelFilesError(f"{PREPROCESSOR} has no image_mean and image_std; fetch it again")
        return tuple(mean), tuple(std)


def reads_images(hf: Mapping[str, Any]) -> bool:
    """Or sounds."""
    return hf.get("multimodal_type") in FAMILIES


def reads_sounds(hf: Mapping[str, Any]) -> bool:
    return reads_images(hf) and FAMILIES[hf["multimodal_type"]].reads_sounds


def sight_of(hf: Mapping[str, Any]) -> Sight:
    """Of the tokens of prompts."""
    if not reads_images(hf):
        return Sight.NONE
    family = FAMILIES[hf["multimodal_type"]]
    is_blind = family.sees_if_stated and hf.get("use_bidirectional_attention") != "vision"
    return Sight.NONE if is_blind else family.sight


def read_image_files(source: ModelSource) -> ImageFiles:
    hf = source.hf_config()
    preprocessor = _preprocessor(source)
    if not preprocessor:
        raise ModelFilesError(f"{source.path} has no {PREPROCESSOR}; fetch it")
    video = _processor(source, VIDEO_PREPROCESSOR, "video_processor")
    return ImageFiles(str(hf.get("multimodal_type")), preprocessor, hf, video)


def _preprocessor(source: ModelSource) -> Mapping[str, Any]:
    key = "feature_extractor" if reads_sounds(source.hf_config()) else "image_processor"
    return _processor(source, PREPROCESSOR, key)


def _processor(source: ModelSource, name: str, key: str) -> Mapping[str, Any]:
    """Of a file of its own, or else of the one for all processors; empty: of none."""
    for file, inside in ((name, None), (PROCESSOR, key)):
        if (source.path / file).is_file():
            values = read_json(source.path / file)
            processor = values if inside is None else values.get(inside)
            if isinstance(processor, dict) and processor:
                return processor
    return {}


def placeholder_of(source: ModelSource) -> int:
    """The token id that stands for an image or a sound in a prompt."""
    hf = source.hf_config()
    kind = "audio" if reads_sounds(hf) else "image"
    names = (f"{kind}_token_id", f"{kind}_token_index", "media_placeholder_token_id")  # the last one of Kimi K2.5
    token_id = next((hf[name] for name in names if hf.get(name) is not None), None)
    if not isinstance(token_id, int):
        raise ModelFilesError(f"{source.path}: config.json has no {kind}_token_id; fetch it again")
    return token_id


class VideoTokens(NamedTuple):
    """The token ids of a video in a prompt, as the chat template writes it."""

    start: int
    placeholder: int
    end: int


def video_tokens_of(source: ModelSource) -> VideoTokens | None:
    """None: the model reads none."""
    hf, pair = source.hf_config(), pair_around(source)
    token_id = hf.get("video_token_id")
    if pair is None or not isinstance(token_id, int):
        return None
    return VideoTokens(pair[0], token_id, pair[1])


def vectors_per_token(hf: Mapping[str, Any]) -> int:
    """How many vectors of hidden_size the encoder computes for a token of an image.

    The first is its embedding. The others (DeepStack) are added behind the first layers, one behind each.
    """
    vision = hf.get("vision_config")
    layers = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) and reads_images(hf) else None
    return 1 + len(layers or ())


def pair_around(source: ModelSource) -> tuple[int, int] | None:
    """The token ids before and after an image in a prompt; None: it has none, or config.json does not tell."""
    hf = source.hf_config()
    start, end = (hf.get(f"vision_{side}_token_id", hf.get(f"image_{side}_token_id")) for side in ("start", "end"))
    return (start, end) if isinstance(start, int) and isinstance(end, int) else None


def has_image_files(source: ModelSource) -> bool:
    return isinstance(source, FolderSource) and bool(_preprocessor(source))
