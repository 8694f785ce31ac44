"""Which experts the tokens of a sequence were routed to, in the formats of SGLang and of vLLM.

The last token of a sequence is not among them: the model has not computed it.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import orjson

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.messages.control import RoutedExpertsShape
from lightserve.messages.params import GenerationParams
from lightserve.messages.step import Token

UINT8_EXPERTS = 256
MANY_BYTES = 2**20  # are written within 10 ms
PIECE_TOKENS = 3 * 2**8
PIECE_BYTES = 3 * 2**18


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

    @property
    def are_many(self) -> bool:
        """So many that a thread should write them: other requests would wait."""
        return sum(map(len, self._parts)) > MANY_BYTES

    def for_sglang(self, shape: RoutedExpertsShape, start: int, end: int) -> orjson.Fragment:
        """``[tokens, layers of the model, top_k]`` int32. Layers without experts have zeros."""
        rows = self._rows(shape, start, end)

        def piece(begin: int) -> bytes:
            chosen = rows[begin : begin + PIECE_TOKENS]
            whole = np.zeros((len(chosen), shape.num_layers, shape.top_k), dtype=np.int32)
            whole[:, list(shape.layers)] = chosen
            return whole.tobytes()

        return _json_string(piece(begin) for begin in range(0, len(rows), PIECE_TOKENS))

    def for_vllm(self, shape: RoutedExpertsShape, start: int, end: int) -> orjson.Fragment:
        """A .npy file of ``[tokens, layers with experts, top_k]`` uint8, or uint16 for more than 256 experts."""
        file = io.BytesIO()
        np.save(file, self._rows(shape, start, end), allow_pickle=False)
        content = file.getbuffer()
        return _json_string(content[begin : begin + PIECE_BYTES] for begin in range(0, len(content), PIECE_BYTES))

    def _rows(self, shape: RoutedExpertsShape, start: int, end: int) -> npt.NDArray[np.unsignedinteger]:
        """Of the tokens from ``start`` to ``end``."""
        dtype = np.uint8 if shape.num_experts <= UINT8_EXPERTS else np.uint16
        flat: npt.NDArray[np.unsignedinteger] = np.frombuffer(b"".join(self._parts), dtype=dtype)
        return flat.reshape(-1, len(shape.layers), shape.top_k)[start:end]


def _json_string(pieces: Iterable[bytes | memoryview]) -> orjson.Fragment:
    """Of bytes in base64. Between two pieces, whose lengths are multiples of 3, other threads run."""
    return orjson.Fragment(b"".join((b'"', *(b64encode(piece) for piece in pieces), b'"')))
