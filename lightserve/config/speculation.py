"""How the workers draft tokens: the JSON of --speculative_config."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lightserve.errors import OptionError
from lightserve.utils.spelling import nearest

METHODS = ("ngram", "eagle3", "mtp", "auto")
HEADS = ("eagle3", "mtp")  # methods that compute a layer of a model
DEFAULT_DRAFTS, DEFAULT_MIN, DEFAULT_MAX = 4, 3, 4
DEFAULT_HEAD_DRAFTS = 3
OF_NGRAM, OF_EAGLE = ("prompt_lookup_max", "prompt_lookup_min"), ("model",)  # fields of one method
MAX_DRAFTS, MAX_NGRAM = 32, 32


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields have vLLM's names."""

    method: str = "ngram"
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)] = DEFAULT_DRAFTS  # at most, in a step
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=MAX_NGRAM)] = DEFAULT_MAX  # tokens of an n-gram
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=MAX_NGRAM)] = DEFAULT_MIN
    model: str | None = None  # the folder or the name of an EAGLE-3 head

    @property
    def has_head(self) -> bool:
        """Drafts are computed by a layer of a model."""
        return self.method in HEADS

    @property
    def text(self) -> str:
        """The JSON of the flag."""
        names = OF_NGRAM if self.method == "ngram" else OF_EAGLE if self.method == "eagle3" else ()
        fields = {name: getattr(self, name) for name in ("method", "num_speculative_tokens", *names)}
        return msgspec.json.encode(fields).decode()

    @property
    def summary(self) -> str:
        """For the banner."""
        if self.has_head:
            head = "" if self.model is None else f" by {self.model}"
            return f"{self.method}{head}, up to {self.num_speculative_tokens} drafts a step"
        sizes = f"{self.prompt_lookup_min} to {self.prompt_lookup_max} tokens"
        return f"{self.method} of {sizes}, up to {self.num_speculative_tokens} drafts a step"


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
    method = fields.get("method")
    if method not in METHODS:
        what = "there is no method" if method is None else f"the method {method!r} is not supported"
        raise _error(f"{what}; supported: {', '.join(METHODS)}")
    known = SpeculativeConfig.__struct_fields__
    for name in fields:
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
    return config


def _check_method(method: str, fields: dict[str, Any]) -> None:
    """Check the fields that only one method reads."""
    for owner, names in (("ngram", OF_NGRAM), ("eagle3", OF_EAGLE)):
        given = [name for name in names if name in fields]
        if given and method != owner:
            raise _error(f"{given[0]} is a field of the method {owner}, not of {method}; leave it out")
    if method == "eagle3" and not fields.get("model"):
        raise _error('the method eagle3 needs "model": the folder or the name of a head; add it')
    if method in HEADS:
        fields.setdefault("num_speculative_tokens", DEFAULT_HEAD_DRAFTS)


def _add_other_bound(fields: dict[str, Any]) -> None:
    """If one bound is given and the default of the other one does not fit, both are the same, as in vLLM."""
    least, most = fields.get("prompt_lookup_min"), fields.get("prompt_lookup_max")
    if most is None and isinstance(least, int) and least > DEFAULT_MAX:
        fields["prompt_lookup_max"] = least
    if least is None and isinstance(most, int) and most < DEFAULT_MIN:
        fields["prompt_lookup_min"] = most


def _error(problem: str) -> OptionError:
    return OptionError(f"speculative_config: {problem}")
