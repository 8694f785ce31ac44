"""Which task a model is for, from its files, and how it pools the hidden states of a text.

===============  ==================================================================================================
``generate``     text; every decoder
``embed``        one vector for each text
``token_embed``  one vector for each token of a text
``classify``     one score for each label of a classification head
``score``        how well a document answers a query: by a head with one label, or by the logits of "yes" and "no"
``reward``       one number that says how good an answer is
===============  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lightserve.errors import ModelFilesError
from lightserve.model_files.config.names import with_common_names
from lightserve.model_files.pooling.head import Head, HeadLayer, classification_head, hidden_size, reward_head
from lightserve.model_files.pooling.late_interaction import PLAIN, STANFORD, LateInteraction, read_stanford
from lightserve.model_files.pooling.score_templates import ScoreTemplate, read_score_template
from lightserve.model_files.pooling.sentence_transformers import SentenceTransformer, read_sentence_transformer

Task = Literal["generate", "embed", "token_embed", "classify", "score", "reward"]
Pooling = Literal["cls", "mean", "last", "max"]
ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "nomic_bert", "modernbert"})
# whose tokens see later ones, in Gemma 4: those of an image, or all
GEMMA4_BIDIRECTIONAL = {"vision": False, "all": True}
# classes of decoders without a head for text; others of that name, such as ChatGLMModel, generate
EMBEDDERS = frozenset(
    {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "GemmaModel", "Gemma2Model", "Gemma3TextModel"}
)
CLASSIFIER = "ForSequenceClassification"
REWARD = "ForRewardModel"
ANSWERS = ("no", "yes")  # of Qwen3-Reranker
MAX_LABELS = 100_000
GGUF_POOLING = "gguf_pooling"  # of a GGUF file's metadata
OLDER_ACTIVATION = "sbert_ce_default_activation_function"  # before sentence-transformers 4


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    task: Task
    pooling: str  # of Pooling, or "tokens": none
    size: int  # of the result
    head: tuple[HeadLayer, ...] = ()
    is_causal: bool = True
    answers: tuple[str, ...] | None = None  # score by the logits of these tokens, one or two; the last is the good one
    template: ScoreTemplate | None = (
        None  # of a query and a document; None: that of Qwen3-Reranker, if there are answers
    )
    labels: tuple[str, ...] = ()
    is_multi_label: bool = False  # labels do not exclude each other
    is_regression: bool = False  # the number of the only label is the score, without a sigmoid
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_len: int | None = None  # tokens of a text, if the files say it
    type_vocab_size: int = 1  # 2: the second text of a pair has token type 1
    late: LateInteraction | None = None  # how texts are encoded whose tokens have a vector each

    def __str__(self) -> str:
        """For the operator: "embed (mean of the tokens, 384 numbers)"."""
        tokens = {"cls": "first token", "last": "last token", "mean": "mean of the tokens", "max": "largest values"}
        vectors = tokens.get(self.pooling, "each token")
        return f"{self.task} ({vectors}, {self.size} number{'s' if self.size > 1 else ''})"

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the hidden states of all tokens count, so that a cached prefix cannot be used."""
        return self.pooling != "last"

    @property
    def module_folders(self) -> tuple[str, ...]:
        """Folders of sentence-transformers' modules with weights."""
        return tuple(layer.name.removesuffix(".linear") for layer in self.head if layer.name.endswith(".linear"))

    @property
    def is_pair_scorer(self) -> bool:
        """Whether the model reads a query and a document together and returns one score."""
        return self.task not in ("embed", "token_embed") and (self.answers is not None or self.size == 1)


def read_pooling(
    hf: Mapping[str, Any],
    folder: Path | None,
    task: str | None = None,
    pooling: str | None = None,
    score_template: str | None = None,
) -> PoolingConfig | None:
    """``hf``: config.json. ``folder``: the model's, if it has one. The others are the operator's flags.

    None: the model generates text.
    """
    hf = with_common_names(hf)
    extra = None if folder is None else read_sentence_transformer(folder)
    chosen = _task_of(hf, extra) if task is None else task
    if chosen not in get_args(Task):
        raise ModelFilesError(f"--task {chosen}: must be one of {', '.join(get_args(Task))}")
    if chosen == "generate" and task is None and score_template is not None:
        chosen = "score"
    if chosen == "generate":
        _check_generates(hf, pooling, score_template)
        return None
    config = _of_task(chosen, hf, folder, extra)
    if score_template is not None:
        config = _with_template(config, hf, score_template)
    return config if pooling is None else _with_pooling(config, pooling)


def is_encoder(hf: Mapping[str, Any]) -> bool:
    return hf.get("model_type") in ENCODERS


def _task_of(hf: Mapping[str, Any], extra: SentenceTransformer | None) -> str:
    name = _architecture(hf)
    if name == STANFORD or (extra is not None and extra.late is not None):
        return "token_embed"
    if extra is not None:
        return "embed"
    if name.endswith(REWARD):
        return "reward"
    if name.endswith(CLASSIFIER):
        return "classify"
    if _answers(hf) is not None:
        return "score"
    has_pooling = hf.get(GGUF_POOLING) is not None
    return "embed" if is_encoder(hf) or name in EMBEDDERS or has_pooling else "generate"


def _of_task(task: str, hf: Mapping[str, Any], folder: Path | None, extra: SentenceTransformer | None) -> PoolingConfig:
    name = _architecture(hf)
    if task == "embed" and extra is not None and extra.late is not None:
        raise ModelFilesError("--task embed: the model was trained for a vector for each token; leave it out")
    if task == "embed":
        config = _embedder(hf, extra)
    elif task == "token_embed":
        config = _token_embedder(hf, folder, extra)
    elif task == "reward" and name.endswith(REWARD):
        config = _with_head(task, hf, reward_head(hf), 1)
    elif name.endswith(CLASSIFIER):
        labels = _labels(hf)
        if task == "score" and len(labels) != 1:
            raise ModelFilesError(f"--task score needs a head with one label; this one has {len(labels)}: use classify")
        head = classification_head(hf, len(labels))
        is_regression = len(labels) == 1 and _is_regression(hf)
        config = replace(_with_head(task, hf, head, len(labels)), labels=labels, is_regression=is_regression)
    elif task == "score" and not is_encoder(hf):
        answers = _answers(hf) or ANSWERS
        config = _by_answers(answers)
    else:
        raise ModelFilesError(
            f"--task {task}: the model is a {name or 'model without a class'}, which has no such head"
        )
    types = hf.get("type_vocab_size", 1) if is_encoder(hf) else 1
    return replace(config, is_causal=_is_causal(hf), type_vocab_size=types if isinstance(types, int) else 1)


def _token_embedder(hf: Mapping[str, Any], folder: Path | None, extra: SentenceTransformer | None) -> PoolingConfig:
    if _is_causal(hf):  # its texts come in chunks, and its mask tokens would see each other
        raise ModelFilesError("--task token_embed: tokens of this model see no later ones; it needs an encoder")
    if _architecture(hf) == STANFORD:
        late, size = read_stanford(folder)
        head = (HeadLayer("linear", hidden_size(hf), size, has_bias=False),)
        longest = max(late.query_length, late.document_length)
        return PoolingConfig("token_embed", "tokens", size, head, max_len=longest, late=late)
    if extra is None:
        return PoolingConfig("token_embed", "tokens", hidden_size(hf), late=PLAIN)
    embedder = _embedder(hf, replace(extra, pooling="tokens"))
    return replace(embedder, task="token_embed", late=extra.late or PLAIN)


def _embedder(hf: Mapping[str, Any], extra: SentenceTransformer | None) -> PoolingConfig:
    if extra is None:
        pooling = hf.get(GGUF_POOLING) or ("mean" if is_encoder(hf) else "last")
        return PoolingConfig("embed", pooling, hidden_size(hf))
    sizes = [hidden_size(hf), *(layer.out_size for layer in extra.dense)]
    for size, layer in zip(sizes, extra.dense, strict=False):
        if layer.in_size != size:
            raise ModelFilesError(f"{layer.name}: in_features is {layer.in_size}, but it receives {size} numbers")
    return PoolingConfig(
        "embed",
        extra.pooling,
        sizes[-1],
        extra.dense,
        prompts=extra.prompts,
        default_prompt=extra.default_prompt,
        max_len=extra.max_len,
    )


def _with_head(task: str, hf: Mapping[str, Any], head: Head, labels: int) -> PoolingConfig:
    is_multi_label = hf.get("problem_type") == "multi_label_classification"
    kind: Task = "reward" if task == "reward" else "score" if task == "score" else "classify"
    return PoolingConfig(kind, head.pooling, labels, head.layers, is_multi_label=is_multi_label)


def _is_regression(hf: Mapping[str, Any]) -> bool:
    """Whether a cross-encoder returns its number as it is, by sentence-transformers' fields or by transformers'."""
    table = hf.get("sentence_transformers")
    name = table.get("activation_fn") if isinstance(table, dict) else hf.get(OLDER_ACTIVATION)
    if name is None:
        return hf.get("problem_type") == "regression"
    activation = str(name).rpartition(".")[2]
    if activation not in ("Identity", "Sigmoid"):
        text = activation[:100]
        raise ModelFilesError(f"config.json: activation_fn {text!r} is not supported; supported: Identity, Sigmoid")
    return activation == "Identity"


def _by_answers(answers: tuple[str, ...]) -> PoolingConfig:
    return PoolingConfig("score", "last", size=len(answers), answers=answers, labels=answers)


def _with_template(config: PoolingConfig, hf: Mapping[str, Any], value: str) -> PoolingConfig:
    """The tokens of the model's files go before those of the template."""
    if not config.is_pair_scorer:
        raise ModelFilesError(f"--score_template: the model does not score pairs of texts ({config}); leave it out")
    template = read_score_template(value)
    if config.answers is not None and template.answers and _answers(hf) is None:
        config = replace(_by_answers(template.answers), is_causal=config.is_causal)
    return replace(config, template=template)


def _with_pooling(config: PoolingConfig, pooling: str) -> PoolingConfig:
    if config.pooling == "tokens":
        raise ModelFilesError(f"--pooling {pooling}: the vectors of tokens are not pooled ({config}); leave it out")
    if pooling not in get_args(Pooling):
        raise ModelFilesError(f"--pooling {pooling}: must be one of {', '.join(get_args(Pooling))}")
    if config.answers is not None and pooling != "last":
        raise ModelFilesError(f"--pooling {pooling}: the answer of this model is at the last token; leave it out")
    return replace(config, pooling=pooling)


def _check_generates(hf: Mapping[str, Any], pooling: str | None, score_template: str | None) -> None:
    if is_encoder(hf):
        raise ModelFilesError(f"--task generate: {hf.get('model_type')} is an encoder, which generates no text")
    if not _is_causal(hf):
        raise ModelFilesError("--task generate: the tokens of this model see later ones, so it generates no text")
    if pooling is not None:
        raise ModelFilesError(f"--pooling {pooling}: this model generates text; set --task embed")
    if score_template is not None:
        raise ModelFilesError("--score_template: this model generates text; set --task score")


def _is_causal(hf: Mapping[str, Any]) -> bool:
    """Decoders that were trained to embed may see all tokens of a text (gte-Qwen2, EmbeddingGemma)."""
    if is_encoder(hf):
        return False
    for key, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
        value = hf.get(key)
        if isinstance(value, str):
            value = GEMMA4_BIDIRECTIONAL.get(value, value)
        if value is not None and not isinstance(value, bool):
            raise ModelFilesError(f"config.json: {key} is {str(value)[:100]!r}, wanted true or false; correct it")
        if value is (not causal):
            return False
    return True


def _architecture(hf: Mapping[str, Any]) -> str:
    names = hf.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _labels(hf: Mapping[str, Any]) -> tuple[str, ...]:
    names = hf.get("id2label")
    count = hf.get("num_labels")
    if isinstance(names, dict) and names:
        try:
            return tuple(str(names[key]) for key in sorted(names, key=int))
        except ValueError as error:
            raise ModelFilesError("config.json: id2label has keys that are no numbers; correct it") from error
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= MAX_LABELS):
        raise ModelFilesError(f"config.json: num_labels is {str(count)[:100]}, wanted a positive integer; correct it")
    return tuple(f"LABEL_{i}" for i in range(2 if count is None else count))


def _answers(hf: Mapping[str, Any]) -> tuple[str, ...] | None:
    """vLLM's field for models that score by the logits of one token or two."""
    tokens = hf.get("classifier_from_token")
    if tokens is None:
        return None
    if not isinstance(tokens, list) or len(tokens) not in (1, 2) or not all(isinstance(token, str) for token in tokens):
        raise ModelFilesError("config.json: classifier_from_token is not a list of one or two tokens; correct it")
    return tuple(tokens)
