"""LightLLM's and TGI's bodies share paths; their parameters show which one it is."""

from __future__ import annotations

import enum
from typing import Any

from lightserve.errors import InvalidRequestError


class Schema(enum.Enum):
    LIGHTLLM = "LightLLM"
    TGI = "TGI"


LIGHTLLM_ONLY = frozenset(
    {
        "add_spaces_between_special_tokens",
        "add_special_tokens",
        "allowed_token_ids",
        "cache_salt",
        "disable_prompt_cache",
        "early_stopping",
        "exponential_decay_length_penalty",
        "extra_key",
        "first_allowed_token_ids",
        "group_request_id",
        "guided_grammar",
        "guided_json",
        "ignore_eos",
        "image_max_patch_num",
        "input_penalty",
        "invalid_token_ids",
        "length_penalty",
        "logit_bias",
        "min_new_tokens",
        "min_p",
        "move_kv_to_decode_node",
        "n",
        "no_repeat_ngram_size",
        "num_beams",
        "presence_penalty",
        "priority",
        "print_eos_token",
        "prompt_cache_key",
        "prompt_logprobs",
        "regular_constraint",
        "return_details",
        "session_id",
        "skip_special_tokens",
        "stop_sequences",
        "suggested_dp_index",
        "task_id",
        "timeout",
    }
)
TGI_ONLY = frozenset(
    {
        "adapter_id",
        "decoder_input_details",
        "details",
        "grammar",
        "ignore_eos_token",
        "return_full_text",
        "seed",
        "stop",
        "top_n_tokens",
        "truncate",
        "typical_p",
        "watermark",
    }
)
WORKS_IN_BOTH = frozenset({"seed"})  # alone it means TGI, but LightLLM's bodies may have it too


def schema_of(body: dict[str, Any], default: Schema) -> Schema:
    """Select by the parameters that only one of them has; null means absent. A mix of both is refused."""
    parameters = body.get("parameters")
    given = {name for name, value in parameters.items() if value is not None} if isinstance(parameters, dict) else set()
    lightllm, tgi = given & LIGHTLLM_ONLY, given & TGI_ONLY
    if isinstance(body.get("inputs"), list):
        lightllm |= {"inputs as token ids"}
    if body.get("multimodal_params") is not None:
        lightllm |= {"multimodal_params"}
    if lightllm and tgi - WORKS_IN_BOTH:
        lightllm_name, tgi_name = min(lightllm), min(tgi - WORKS_IN_BOTH)
        raise InvalidRequestError(
            f"{lightllm_name} belongs to LightLLM's schema and {tgi_name} to TGI's: use one of the two"
        )
    if lightllm:
        return Schema.LIGHTLLM
    return Schema.TGI if tgi else default
