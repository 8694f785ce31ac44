"""Where a checkpoint has its MTP layer, the layer that was trained to predict the token after the next one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightserve.errors import OptionError
from lightserve.model_files.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class MtpFormat:
    """The names of its tensors, without ``.weight``. In ``layer`` ``{}`` is the number of the model's layers."""

    layer: str = "model.layers.{}"  # attention and feed-forward, as in the layers of the model
    prefix: str = "model.layers.{}."  # of all tensors that only the MTP layers have
    embedding_norm: str = "model.layers.{}.enorm"
    hidden_norm: str = "model.layers.{}.hnorm"
    projection: str = "model.layers.{}.eh_proj"  # of the normed embedding and hidden state to one hidden state
    norm: str = "model.layers.{}.shared_head.norm"  # before the logits
    count_field: str = "num_nextn_predict_layers"  # of config.json
    is_always_promised: bool = False  # config.json need not have that field


QWEN = MtpFormat(
    layer="mtp.layers.0",
    prefix="mtp.",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    norm="mtp.norm",
    count_field="mtp_num_hidden_layers",
    is_always_promised=True,
)
MIMO = MtpFormat(
    layer="model.mtp.layers.0",
    prefix="model.mtp.",
    embedding_norm="model.mtp.layers.0.enorm",
    hidden_norm="model.mtp.layers.0.hnorm",
    projection="model.mtp.layers.0.eh_proj",
    norm="model.mtp.layers.0.final_layernorm",
    is_always_promised=True,
)
FORMATS = {
    "deepseek_v3": MtpFormat(),
    "glm4_moe": MtpFormat(),
    "mimo_v2_flash": MIMO,
    "qwen3_5_moe_text": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_next": QWEN,
}  # by the type of models whose MTP layer can draft


def mtp_format(target: ModelConfig) -> MtpFormat:
    """With the names as they are in the checkpoint of ``target``. Raises an OptionError if its layer cannot draft."""
    mtp = FORMATS.get(target.model_type)
    if mtp is None:
        supported = ", ".join(FORMATS)
        problem = f"method mtp is not supported for {target.model_type}, only for {supported}"
        raise OptionError(f"speculative_config: {problem}; use ngram or eagle3")
    number = target.num_layers
    return replace(
        mtp,
        layer=mtp.layer.format(number),
        prefix=mtp.prefix.format(number),
        embedding_norm=mtp.embedding_norm.format(number),
        hidden_norm=mtp.hidden_norm.format(number),
        projection=mtp.projection.format(number),
        norm=mtp.norm.format(number),
    )


def promises_mtp(target: ModelConfig) -> bool:
    """Whether config.json says that the checkpoint has an MTP layer. Some lack it nevertheless."""
    mtp = FORMATS.get(target.model_type)
    if mtp is None:
        return False
    if target.hf.get(mtp.count_field) is None:
        return mtp.is_always_promised
    return target.count_or_0(mtp.count_field) > 0


def check_mtp(target: ModelConfig) -> None:
    """Raises an OptionError for a model whose checkpoint has no MTP layer that can draft."""
    field = mtp_format(target).count_field
    if not promises_mtp(target):
        problem = f"method mtp: config.json has no {field}, so the checkpoint has no MTP layer"
        raise OptionError(f"speculative_config: {problem}; use ngram or eagle3")
