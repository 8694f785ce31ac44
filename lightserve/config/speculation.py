"""How the workers draft tokens: the JSON of --speculative_config."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lightserve.errors import OptionError
from lightserve.utils.spelling import nearest

METHODS = ("ngram", "suffix", "eagle3", "mtp", "dflash", "draft_model", "auto")
HEADS = ("eagle3", "mtp", "dflash", "draft_model")  # methods that compute layers of a model, or a whole one
DEFAULT_DRAFTS, DEFAULT_MIN, DEFAULT_MAX = 4, 3, 4
DEFAULT_HEAD_DRAFTS = 3
DEFAULT_PAST_OUTPUTS = 100
FIELD_OF = {
    "prompt_lookup_max": ("ngram", "suffix"),
    "prompt_lookup_min": ("ngram", "suffix"),
    "model": ("eagle3", "dflash", "draft_model"),
}  # the methods that read a field
NOT_NEEDED = {
    "draft_tensor_parallel_size": "a head is divided by --tp, as the model is",
    "disable_by_batch_size": "how many drafts a step has depends on what they cost and bring",
    "num_speculative_tokens_per_batch_size": "how many drafts a step has depends on what they cost and bring",
    "draft_sample_method": "drafts have the noise of their request",
}  # vLLM's fields that have no meaning here
SAME_METHODS = {"ngram_gpu": "ngram"}  # vLLM's names; besides those of MTP layers, which begin with a type of models
MAX_DRAFTS, MAX_NGRAM = 32, 32
DEFAULT_DRAFTS_OF = {"dflash": MAX_DRAFTS}  # of a head: as many as a block has, at most


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields have vLLM's names."""

    method: str = "ngram"
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)] = DEFAULT_DRAFTS  # at most, in a step
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=MAX_NGRAM)] = DEFAULT_MAX  # tokens of an n-gram
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=MAX_NGRAM)] = DEFAULT_MIN
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0)] = DEFAULT_PAST_OUTPUTS  # of a salt, for suffix
    rejection_sample_method: Literal["standard", "synthetic"] = "standard"
    synthetic_acceptance_length: float | None = None  # tokens of a request and step on average, for "synthetic"
    model: str | None = None  # the folder or the name of an EAGLE-3 head, a DFlash drafter or a draft model

    @property
    def has_head(self) -> bool:
        """Drafts are computed by a layer of a model, or by a smaller model."""
        return self.method in HEADS

    @property
    def reads_next_token(self) -> bool:
        """The KV that drafts are computed with depends on the token after each."""
        return self.has_head and self.method != "dflash"

    @property
    def text(self) -> str:
        """The JSON of the flag."""
        names, usual = ("method", "num_speculative_tokens"), SpeculativeConfig()
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        fields = {name: value for name, value in given.items() if name in names or value != getattr(usual, name)}
        return msgspec.json.encode(fields).decode()

    @property
    def past_outputs(self) -> int:
        """Outputs of ended requests that are kept for drafts of later ones, with the same salt and adapter."""
        return self.suffix_decoding_max_cached_requests if self.method == "suffix" else 0

    @property
    def is_synthetic(self) -> bool:
        """Whether drafts are accepted by a schedule, whatever the model samples. The texts mean nothing then."""
        return self.rejection_sample_method == "synthetic"

    @property
    def summary(self) -> str:
        """For the banner."""
        source = f" of {self.prompt_lookup_min} to {self.prompt_lookup_max} tokens"
        if self.has_head:
            source = "" if self.model is None else f" by {self.model}"
        drafts = f"{self.method}{source}, up to {self.num_speculative_tokens} drafts a step"
        if not self.is_synthetic:
            return drafts
        return f"{drafts}; SYNTHETIC: {self.synthetic_acceptance_length:g} tokens a step, the texts are not real"


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Raises an OptionError that names what is wrong, and what may be there instead."""
    if text == "auto":
        return SpeculativeConfig("auto")
    try:
        fields = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise _error(f'it is not JSON ({error}); write it as \'{{"method": "ngram"}}\'') from error
    if not isinstance(fields, dict):
        raise _error(f'it must be a JSON object, not {text!r}; write it as \'{{"method": "ngram"}}\'')
    return _checked(fields)


def _checked(fields: dict[str, Any]) -> SpeculativeConfig:
    method = fields["method"] = _method(fields.get("method"))
    known = SpeculativeConfig.__struct_fields__
    for name in fields:
        if name in NOT_NEEDED:
            raise _error(f"{name} is not needed: {NOT_NEEDED[name]}; leave it out")
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else f"known: {', '.join(known)}"
            raise _error(f"there is no field {name!r}; {hint}")
    _check_method(method, fields)
    _add_other_bound(fields)
    try:
        config = msgspec.convert(fields, SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise _error(str(error)) from error
    if config.prompt_lookup_min > config.prompt_lookup_max:
        bounds = f"prompt_lookup_min ({config.prompt_lookup_min}) is more than prompt_lookup_max"
        raise _error(f"{bounds} ({config.prompt_lookup_max})")
    if "suffix_decoding_max_cached_requests" in fields and method != "suffix":
        raise _error('suffix_decoding_max_cached_requests needs the method "suffix"')
    _check_synthetic(config)
    return config


def _method(given: Any) -> str:
    """Its name here. vLLM has further ones for the same, such as qwen3_next_mtp."""
    method = SAME_METHODS.get(given, given) if isinstance(given, str) else given
    if isinstance(method, str) and method.endswith("_mtp"):
        return "mtp"
    if method not in METHODS:
        what = "there is no method" if given is None else f"the method {given!r} is not supported"
        raise _error(f"{what}; supported: {', '.join(METHODS)}")
    return str(method)


def _check_method(method: str, fields: dict[str, Any]) -> None:
    """Check the fields that only one method reads."""
    for name, owners in FIELD_OF.items():
        if name in fields and method not in owners:
            raise _error(f"{name} is a field of the method {owners[0]}, not of {method}; leave it out")
    if method in FIELD_OF["model"] and not fields.get("model"):
        what = {"eagle3": "head", "dflash": "drafter"}.get(method, "smaller model")
        raise _error(f'the method {method} needs "model": the folder or the name of a {what}; add it')
    if method in HEADS:
        fields.setdefault("num_speculative_tokens", DEFAULT_DRAFTS_OF.get(method, DEFAULT_HEAD_DRAFTS))
    if method == "auto" and len(fields) > 1:
        raise _error("the method auto has no other fields; name a method to set them")


def _check_synthetic(config: SpeculativeConfig) -> None:
    length, most = config.synthetic_acceptance_length, config.num_speculative_tokens + 1
    if config.is_synthetic and length is None:
        raise _error(f"rejection_sample_method synthetic needs a synthetic_acceptance_length from 1 to {most}")
    if length is not None and not config.is_synthetic:
        raise _error('synthetic_acceptance_length needs rejection_sample_method "synthetic"')
    if length is not None and not 1 <= length <= most:
        raise _error(
            f"synthetic_acceptance_length is {length:g}; with {config.num_speculative_tokens} num_speculative_tokens "
            f"a step has from 1 to {most} tokens"
        )


def _add_other_bound(fields: dict[str, Any]) -> None:
    """If one bound is given and the default of the other one does not fit, both are the same, as in vLLM."""
    least, most = fields.get("prompt_lookup_min"), fields.get("prompt_lookup_max")
    if most is None and isinstance(least, int) and least > DEFAULT_MAX:
        fields["prompt_lookup_max"] = least
    if least is None and isinstance(most, int) and most < DEFAULT_MIN:
        fields["prompt_lookup_min"] = most


def _error(problem: str) -> OptionError:
    return OptionError(f"speculative_config: {problem}")
