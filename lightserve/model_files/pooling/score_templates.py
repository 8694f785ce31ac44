"""The prompts by which rerankers read a query and a document, and the tokens by which they answer.

A template is Jinja, as vLLM's score templates: it has ``messages`` of the roles ``query`` and ``document``, the same
texts as ``query`` and ``document``, and ``instruction``.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from lightserve.errors import InvalidRequestError, ModelFilesError
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens

MARKS = ("\ue000query\ue001", "\ue000document\ue001")  # no text has them: they are for private use
MAX_INSTRUCTIONS = 64  # whose prompts are kept


class ScoreTemplate(NamedTuple):
    text: str
    answers: tuple[str, ...] = ()  # the good one is the last; empty: as the model's files say, or its head scores
    instruction: str = ""  # unless the request has one
    scale: float = 1.0  # of the logit
    adds_special_tokens: bool = True  # those that begin and end every text of the tokenizer


class PairPrompt(NamedTuple):
    """What surrounds the two texts."""

    before: str
    between: str
    after: str
    has_query_first: bool

    def render(self, query: str, document: str) -> tuple[str, tuple[tuple[int, int], tuple[int, int]]]:
        """The prompt, and where the query and the document are in it."""
        first, second = (query, document) if self.has_query_first else (document, query)
        start = len(self.before) + len(first) + len(self.between)
        spans = (len(self.before), len(self.before) + len(first)), (start, start + len(second))
        prompt = self.before + first + self.between + second + self.after
        return prompt, spans if self.has_query_first else (spans[1], spans[0])


class PairPrompts:
    """The prompts of a template, by instruction. Its texts are not read by the template: they are put in afterwards."""

    def __init__(self, template: ScoreTemplate) -> None:
        from lightserve.model_files.template.chat_template import ChatTemplate  # here, because few models need Jinja

        self.template = template
        self._jinja = ChatTemplate(template.text, SpecialTokens())
        self._cached = lru_cache(MAX_INSTRUCTIONS)(self._pieces)
        self.reads_instruction = "instruction" in self._jinja.variables

    def of(self, instruction: str | None) -> PairPrompt:
        if instruction is not None and not self.reads_instruction:
            raise InvalidRequestError("instruction: the score template of this model has none", "instruction")
        return self._cached(instruction or self.template.instruction)

    def _pieces(self, instruction: str) -> PairPrompt:
        query, document = MARKS
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        fields = {"query": query, "document": document, "instruction": instruction}
        text = self._jinja.render(messages=messages, **fields)
        if text.count(query) != 1 or text.count(document) != 1:
            raise InvalidRequestError("the score template does not show the query and the document once each")
        first, second = sorted(MARKS, key=text.index)
        before, _, rest = text.partition(first)
        between, _, after = rest.partition(second)
        return PairPrompt(before, between, after, first == query)


def read_score_template(value: str) -> ScoreTemplate:
    """Of ``--score_template``: a name of TEMPLATES, a file, or the text itself, which is tried here."""
    if value in TEMPLATES:
        return TEMPLATES[value]
    from jinja2 import TemplateError  # here, because few models need it

    template = ScoreTemplate(value if "{{" in value or "{%" in value else _read(value))
    try:
        PairPrompts(template).of(None)
    except (TemplateError, InvalidRequestError) as error:
        raise ModelFilesError(f"--score_template: {error}") from error
    return template


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(
            f"--score_template {path[:200]}: no such file; give one of {', '.join(TEMPLATES)}, the path of a Jinja "
            "file, or the template itself"
        ) from error


_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {{ instruction }}\n<Query>: {{ query }}\n<Document>: {{ document }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n{{ '' }}"  # Jinja drops a newline at the end
)
_MXBAI = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{% if instruction %}instruction: {{ instruction }}\n{% endif %}"
    "query: {{ query }}\ndocument: {{ document }}\nYou are a search relevance expert who evaluates how well documents "
    "match search queries. For each query-document pair, carefully analyze the semantic relationship between them, "
    "then provide your binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n"
    "<|im_start|>assistant\n{{ '' }}"
)
_BGE_GEMMA = (
    "A: {{ query }}\nB: {{ document }}\nGiven a query A and a passage B, determine whether the passage contains an "
    "answer to the query by providing a prediction of either 'Yes' or 'No'."
)
_ZERANK = (
    "<|im_start|>system\n{{ query }}<|im_end|>\n<|im_start|>user\n{{ document }}<|im_end|>\n"
    "<|im_start|>assistant\n{{ '' }}"
)
_NEMOTRON = "question:{{ query }} \n \n passage:{{ document }}"
WEB_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"

# As the model cards say
TEMPLATES = {
    "qwen3-reranker": ScoreTemplate(_QWEN3, ("no", "yes"), WEB_SEARCH, adds_special_tokens=False),
    "mxbai-rerank-v2": ScoreTemplate(_MXBAI, ("0", "1"), adds_special_tokens=False),
    "bge-reranker-v2-gemma": ScoreTemplate(_BGE_GEMMA, ("Yes",)),
    "zerank": ScoreTemplate(_ZERANK, ("Yes",), scale=1 / 5, adds_special_tokens=False),
    "nemotron-rerank": ScoreTemplate(_NEMOTRON),
}
QWEN3_RERANKER = TEMPLATES["qwen3-reranker"]
