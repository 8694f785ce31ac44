"""The hooks of docs/adding_a_model.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from lightserve.common import basemodel as bm

PAGE = Path(__file__).parent.parent / "docs" / "adding_a_model.md"
# methods that call hooks, that callers of a model use, or that only observe
NOT_HOOKS = {
    *("_init_args", "unused_tensors", "_kv_scales", "_new_weights", "_check_metadata", "set_kv_size"),
    *("add_kv_group", "weight_context", "logits_of"),
    *("distinct_layers_only", "_kernel_key", "forward", "hidden_states", "_context_forward", "_token_forward"),
    *("_adapted", "_post_norm_forward", "_attention_and_mixer", "_attended"),
    *("context_forward", "token_forward", "_forward", "_parallel_forward", "_attention", "_added", "_split_heads"),
    "_without_gate",
    *("_names_of_all_stages", "send_to_next_stage", "keep_states_after", "_aux_until"),
    *(
        "merged_checkpoint",
        "check_adapters",
        "own_names",
        "own_name",
        "check_adapter",
        "adapter_sizes",
        "load_weights",
        "check_part",
    ),
    *("_observe", "_observe_embedding", "_observe_layer", "use_pool_of", "logit_rows"),
}
# the classes with hooks, and their methods that are none
HOOKED: dict[type, set[str]] = {
    bm.LoadableModel: NOT_HOOKS,
    bm.TpPartBaseModel: NOT_HOOKS | {"logits", "local_logits", "gather_logits", "final_states"},
    bm.TransformerLayerInferTpl: NOT_HOOKS,
    bm.DecoderLayerInferTpl: NOT_HOOKS,
    bm.PreLayerInferTpl: NOT_HOOKS,
    bm.PostLayerInferTpl: NOT_HOOKS,
    bm.InferStateInfo: NOT_HOOKS,
    bm.DecoderLayerWeight: NOT_HOOKS,
}


class Hook(NamedTuple):
    name: str
    parameters: str
    returns: str

    @property
    def owner(self) -> type:
        """The class that declares it."""
        return next(cls for cls, not_hooks in HOOKED.items() if self.name in vars(cls) and self.name not in not_hooks)


def documented_hooks() -> list[Hook]:
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \| `(.*?)` \|", PAGE.read_text(), flags=re.MULTILINE)
    return [Hook(*row) for row in rows]


def uncalled_hooks() -> dict[str, set[str]]:
    """By kind of model: hooks that it does not call. "the same" are those of the row above."""
    table = PAGE.read_text().partition("| models | hooks that they do not call |")[2].partition("\n\n")[0]
    uncalled: dict[str, set[str]] = {}
    above: set[str] = set()
    for models, hooks in re.findall(r"^\| (\S.*?) \| (.*?) \|$", table, flags=re.MULTILINE):
        above = set(re.findall(r"`(\w+)`", hooks)) | (above if hooks.startswith("the same") else set())
        uncalled[models.replace("`", "")] = above
    return uncalled
