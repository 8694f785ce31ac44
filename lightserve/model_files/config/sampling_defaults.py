"""The sampling parameters that a model's authors recommend, for requests that do not set them.

They are in ``generation_config.json``, or in the metadata ``general.sampling.*`` of a GGUF file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightserve.errors import InvalidRequestError, ModelFilesError
from lightserve.messages.params import GREEDY_BELOW, GenerationParams
from lightserve.model_files.folder import read_json
from lightserve.model_files.source import ModelSource

FILE = "generation_config.json"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")  # they change greedy outputs too
OFF = ("none", "vllm")  # the second is the name of "none" in vLLM


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    params: Mapping[str, float] = field(default_factory=dict)  # by the names of GenerationParams
    max_new_tokens: int | None = None  # for APIs that otherwise generate until the context is full

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters ``given``, with defaults for the others. A greedy request only gets penalties."""
        if not self.params:
            return dict(given)
        temperature = given.get("temperature", self.params.get("temperature", 1.0))
        names = ("temperature", *PENALTIES) if temperature < GREEDY_BELOW else (*SAMPLING, *PENALTIES)
        return {name: self.params[name] for name in names if name in self.params} | dict(given)

    def __str__(self) -> str:
        values = {**self.params}
        if self.max_new_tokens is not None:
            values["max_new_tokens"] = self.max_new_tokens
        return ", ".join(f"{name} {value:g}" for name, value in values.items())


def read_sampling_defaults(source: ModelSource, choice: str = "auto") -> SamplingDefaults:
    """``choice`` is --generation_config: ``auto`` (the model's own), ``none``, or a folder or file with another one."""
    if choice in OFF:
        return SamplingDefaults()
    if choice == "auto":
        return _checked(source.path, source.generation_config())
    path = Path(choice).expanduser()
    path = path / FILE if path.is_dir() else path
    return _checked(path, read_json(path))


def _checked(path: Path, config: Mapping[str, Any]) -> SamplingDefaults:
    params = {name: config[name] for name in (*SAMPLING, *PENALTIES) if config.get(name) is not None}
    if config.get("do_sample") is False:  # transformers then ignores the values that only matter for sampling
        params = {"temperature": 0.0} | {name: value for name, value in params.items() if name in PENALTIES}
    new_tokens = config.get("max_new_tokens")
    try:
        GenerationParams.of(**params, **({} if new_tokens is None else {"max_new_tokens": new_tokens}))
    except InvalidRequestError as error:
        raise ModelFilesError(
            f"{path}: {FILE}: {str(error)[:200]}; correct it, or use --generation_config none"
        ) from error
    return SamplingDefaults(params, new_tokens)
