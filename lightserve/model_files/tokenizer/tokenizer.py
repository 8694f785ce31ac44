"""Text to ids and back, without torch and without transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import tokenizers
from jinja2 import TemplateError

from lightserve.errors import InvalidRequestError, ModelFilesError
from lightserve.model_files.gguf.tokenizer import tokenizer_from_gguf
from lightserve.model_files.source import GgufSource, ModelSource
from lightserve.model_files.template.chat_template import DEFAULT, ChatTemplate, ChatTemplates, given_template
from lightserve.model_files.tokenizer.decoding import Decoder, make_decoder
from lightserve.model_files.tokenizer.folder_tokenizer import has_vocabulary, tokenizer_from_folder
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens

LONG = 1_000  # tokens: for fewer, a batch call takes longer (4 us) than the GIL it releases is worth
NO_TOKENIZER = "%s has no tokenizer: prompts must be token ids, and responses have no text"  # for a log


class TextPair(NamedTuple):
    """Two texts encoded together; each list has an entry for each token."""

    ids: list[int]
    types: list[int]  # token types, as the model reads them
    texts: list[int | None]  # 0 or 1: of the first or the second text; None: a special token


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        chat_template: str | Mapping[str, str] | None,
        note: str = "",
    ) -> None:
        """``chat_template``: in Jinja; one, or several by their names. ``note``: what the operator should know."""
        self.note = note
        self._backend = backend
        self._special = special
        texts = {DEFAULT: chat_template} if isinstance(chat_template, str) else chat_template
        self._templates = ChatTemplates(texts, special) if texts else None
        added = backend.get_added_tokens_decoder()
        special_by_id = {i: token for i, token in added.items() if token.special}
        self.added_tokens = frozenset(token.content for token in added.values())  # text is never split inside them
        self.special_ids = frozenset(special_by_id)
        self.special_tokens = frozenset(token.content for token in special_by_id.values())
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token(self) -> str | None:
        return self._special.bos

    @property
    def eos_token(self) -> str | None:
        return self._special.eos

    @property
    def bos_id(self) -> int | None:
        return None if self._special.bos is None else self.token_to_id(self._special.bos)

    @property
    def eos_id(self) -> int | None:
        return None if self._special.eos is None else self.token_to_id(self._special.eos)

    @property
    def mask_id(self) -> int | None:
        """Of the token that expands queries: the eos if there is no mask, as in PyLate."""
        return self.eos_id if self._special.mask is None else self.token_to_id(self._special.mask)

    @cached_property
    def decoder(self) -> Decoder:
        """Decodes ids to text, token by token."""
        return make_decoder(self)

    @property
    def longest_token(self) -> int:
        """Characters of the longest vocabulary entry: a text of n characters has at least n / longest_token tokens."""
        return self._vocab_extent[0]

    @property
    def num_ids(self) -> int:
        """The highest id plus one, which may exceed the number of tokens."""
        return self._vocab_extent[1]

    @cached_property
    def _vocab_extent(self) -> tuple[int, int]:
        """Longest token and highest id plus one, computed together: listing 128,000 entries takes 70 ms."""
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return max(map(len, vocab), default=1), 1 + max(vocab.values(), default=-1)

    def differing_token(self, tokenizer: Tokenizer) -> str | None:
        """A token that has another id in ``tokenizer``, or none, among the ids that both have; None: there is none."""
        vocab, common = self._backend.get_vocab(with_added_tokens=True), min(self.num_ids, tokenizer.num_ids)
        ids = tokenizer._backend.get_vocab(with_added_tokens=True)
        return next((token for token, i in vocab.items() if i < common and ids.get(token) != i), None)

    def warm_up(self) -> None:
        """Compute in advance what the first encoding would otherwise wait for."""
        _ = self._vocab_extent
        self.encode("warm")

    @property
    def has_chat_template(self) -> bool:
        return self._templates is not None

    @property
    def chat_template(self) -> str | None:
        """The default template, in Jinja."""
        return None if self._templates is None else self._templates.default_text

    @property
    def chat_template_text(self) -> str:
        """All templates, one after another: what one of them contains, the model may write."""
        return "" if self._templates is None else self._templates.text

    def make_template(self, text: str) -> ChatTemplate:
        """One that a request brings. It may take milliseconds to compile."""
        try:
            return ChatTemplate(text, self._special)
        except (TemplateError, RecursionError) as error:
            raise InvalidRequestError(f"chat_template: not valid Jinja ({error})", "chat_template") from error

    def choose_template(self, has_tools: bool, has_documents: bool) -> ChatTemplate:
        """The template for a chat with or without tools and documents."""
        if self._templates is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions with a plain prompt")
        return self._templates.choose(has_tools, has_documents)

    # The backend's batch calls release the GIL; its other calls would stop every thread for seconds on a long text.
    # For the same reason offsets are read one by one: the list of all is a single call of 0.4 us per token.

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _check_unicode(text)
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_pair(self, first: str, second: str) -> TextPair:
        _check_unicode(first)
        _check_unicode(second)
        encoding = self._backend.encode_batch([(first, second)])[0]
        return TextPair(encoding.ids, encoding.type_ids, encoding.sequence_ids)

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        """(id, start, stop) of each token, in characters of ``text``; (0, 0) for a token that is not from the text."""
        _check_unicode(text)
        encoding = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return [(token_id, *(encoding.token_to_chars(i) or (0, 0))) for i, token_id in enumerate(encoding.ids)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. Ids outside the vocabulary (padding of the embedding) have no text."""
        if len(ids) < LONG:
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        texts: list[str] = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return texts[0]

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry as it is stored, for example ``Ġworld``."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def decoder_json(self) -> str | None:
        """The field ``decoder`` of ``tokenizer.json``: how tokens become text."""
        decoder = self._backend.decoder
        return None if decoder is None else decoder.__getstate__().decode()

    def to_json(self) -> str:
        """The whole tokenizer as the text of a ``tokenizer.json``, for libraries that read one."""
        text: str = self._backend.to_str()
        return text

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        documents: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for ``messages``. Encode it with ``add_special_tokens=False``: the template adds them itself."""
        template = self.choose_template(bool(tools), bool(documents))
        return template.render(
            messages=messages, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt, **kwargs
        )


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair
        raise InvalidRequestError(f"the text is not valid Unicode: {error.reason} at {error.start}") from error


def has_tokenizer(source: ModelSource) -> bool:
    """A GGUF file always has a tokenizer. A folder may have none."""
    return isinstance(source, GgufSource) or has_vocabulary(source.path)


def load_tokenizer_or_none(source: ModelSource, chat_template: str | None = None) -> Tokenizer | None:
    return load_tokenizer(source, chat_template) if has_tokenizer(source) else None


def load_tokenizer(source: ModelSource, chat_template: str | None = None) -> Tokenizer:
    """``chat_template``: a file or a text that replaces the model's own templates."""
    templates = source.chat_templates() if chat_template is None else given_template(chat_template)
    try:
        if isinstance(source, GgufSource):
            return Tokenizer(*tokenizer_from_gguf(source.header), templates)
        backend, special, note = tokenizer_from_folder(source.path, source.trusts_code)
        return Tokenizer(backend, special, templates, note)
    except ModelFilesError:
        raise
    except (TemplateError, RecursionError) as error:
        origin = source.path if chat_template is None else "--chat_template"
        raise ModelFilesError(f"{origin}: the chat template is not valid Jinja ({error}); correct it") from error
    except Exception as error:  # tokenizers raises only Exception, and a damaged file may cause any error
        reason = " ".join(str(error).split())[:200]
        raise ModelFilesError(f"{source.path}: its tokenizer is damaged ({reason}); download it again") from error
