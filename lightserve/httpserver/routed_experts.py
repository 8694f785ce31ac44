"""Which experts the tokens of a sequence were routed to, in the formats of SGLang and of vLLM.

The last token of a sequence is not among them: the model has not computed it.
"""

from __future__ import annotations

import io
from base64 import b64encode

import numpy as np
import numpy.typing as npt

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.messages.control import RoutedExpertsShape
from lightserve.messages.params import GenerationParams
from lightserve.messages.step import Token

UINT8_EXPERTS = 256


def experts_shape(context: ServerContext, params: GenerationParams) -> RoutedExpertsShape:
    """Raises InvalidRequestError if they are not known."""
    shape = context.manager.limits.routed_experts
    if (
        params.sampling.grammar is not None
    ):  # tokens that it forces reach the router before anybody has read their experts
        message = "return_routed_experts: not with a grammar (json_schema, regex, ebnf, structural_tag); leave out one"
        raise InvalidRequestError(message, "return_routed_experts")
    if shape is None:
        message = "return_routed_experts: start the server with --enable_return_routed_experts"
        raise InvalidRequestError(message, "return_routed_experts")
    return shape


class RoutedExperts:
    """Of a sequence. They come with its tokens."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, token: Token) -> None:
        if token.routed_experts is not None:
            self._parts.append(token.routed_experts)

    def for_sglang(self, shape: RoutedExpertsShape, start: int, end: int) -> str:
        """``[tokens, layers of the model, top_k]`` int32. Layers without experts have zeros."""
        rows = self._rows(shape, start, end)
        whole = np.zeros((len(rows), shape.num_layers, shape.top_k), dtype=np.int32)
        whole[:, list(shape.layers)] = rows
        return b64encode(whole.tobytes()).decode()

    def for_vllm(self, shape: RoutedExpertsShape, start: int, end: int) -> str:
        """A .npy file of ``[tokens, layers with experts, top_k]`` uint8, or uint16 for more than 256 experts."""
        file = io.BytesIO()
        np.save(file, self._rows(shape, start, end), allow_pickle=False)
        return b64encode(file.getvalue()).decode()

    def _rows(self, shape: RoutedExpertsShape, start: int, end: int) -> npt.NDArray[np.unsignedinteger]:
        """Of the tokens from ``start`` to ``end``."""
        dtype = np.uint8 if shape.num_experts <= UINT8_EXPERTS else np.uint16
        flat: npt.NDArray[np.unsignedinteger] = np.frombuffer(b"".join(self._parts), dtype=dtype)
        return flat.reshape(-1, len(shape.layers), shape.top_k)[start:end]
