"""The reasoning of a model before its answer, between a pair of tags."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.errors import ServerError
from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.deltas import CallStart
from lightserve.text.parsing.parser import OutputParser
from lightserve.text.parsing.text_stream import Incremental, TextStream
from lightserve.text.parsing.tool_calls import harmony
from lightserve.text.parsing.tool_calls.base import Parse


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    begin: str
    end: str
    is_implied: bool = False  # the model may omit the first tag: it reasons unless the prompt disables it
    after_end: str = ""  # what the model writes after the end tag, before a call or an answer
    answer_begin: str = ""  # what an answer begins with
    parse_output: Parse | None = None  # a parser of the whole output, where reasoning is not simply between the tags
    special_markers: tuple[str, ...] = ()  # for ``parse_output``

    @property
    def markers(self) -> tuple[str, ...]:
        """May be special tokens of the model; the parser must see them nevertheless."""
        return self.special_markers or (self.begin, self.end)

    def is_in(self, template: str) -> bool:
        """Whether a chat template uses this format. Other formats have the end tag of Harmony too."""
        return self.begin in template or (self.parse_output is None and self.end in template)

    def begins_inside(self, prompt: str, is_continued: bool = False) -> bool:
        """Whether the output starts inside the tags. ``is_continued``: the prompt ends with the start of the output."""
        if is_continued:
            return prompt.rfind(self.begin) > prompt.rfind(self.end)
        ending = prompt.rstrip()
        return ending.endswith(self.begin) or (self.is_implied and not ending.endswith(self.end))


MAX_UNDECIDED = 1000  # characters in the reasoning that may be the head of a call; a name has at most 256
THINK = ReasoningFormat("<think>", "</think>")
THINK_IMPLIED = ReasoningFormat("<think>", "</think>", is_implied=True)
MISTRAL = ReasoningFormat("[THINK]", "[/THINK]")
SEED = ReasoningFormat("<seed:think>", "</seed:think>")
KIMI_VL = ReasoningFormat("◁think▷", "◁/think▷")
GEMMA = ReasoningFormat("<|channel>thought", "<channel|>")
COHERE = ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>")
APERTUS = ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>")
GRANITE = ReasoningFormat("Here is my thought process:", "Here is my response:")
APRIEL = ReasoningFormat("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
HARMONY = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    after_end="<|start|>assistant",
    answer_begin="<|channel|>final<|message|>",
    parse_output=harmony.parse,
    special_markers=harmony.MARKERS,
)
# in the order of the search
KNOWN_FORMATS = (HARMONY, GEMMA, COHERE, APERTUS, THINK, MISTRAL, SEED, KIMI_VL, GRANITE, APRIEL)
# the names that vLLM and SGLang use; a name may also be written with dashes
FORMATS_BY_NAME = {
    "qwen3": THINK,
    "deepseek_r1": THINK_IMPLIED,
    "deepseek_v3": THINK,
    "deepseek_v4": THINK,
    "glm45": THINK,
    "glm47": THINK,
    "kimi": KIMI_VL,
    "kimi_k2": THINK,
    "hunyuan_a13b": THINK,
    "hy_v3": THINK,
    "holo2": THINK,
    "ernie45": THINK_IMPLIED,
    "interns1": THINK,
    "mimo": THINK,
    "nemotron_v3": THINK,
    "ling3": THINK,
    "poolside_v1": THINK,
    "minimax": THINK_IMPLIED,
    "minimax_m2": THINK_IMPLIED,
    "olmo3": THINK_IMPLIED,
    "qwen3_thinking": THINK_IMPLIED,
    "step3": THINK_IMPLIED,
    "step3p5": THINK_IMPLIED,
    "mistral": MISTRAL,
    "seed_oss": SEED,
    "granite": GRANITE,
    "gemma4": GEMMA,
    "cohere_command3": COHERE,
    "cohere_command4": COHERE,
    "openai_gptoss": HARMONY,
    "gpt_oss": HARMONY,
}


def reasoning_format(choice: str, template: str) -> ReasoningFormat | None:
    """The format by name or as ``BEGIN,END``; ``auto``: the one whose tags are in the chat template, or None."""
    if choice == "none":
        return None
    if choice == "auto":
        return next((candidate for candidate in KNOWN_FORMATS if candidate.is_in(template)), None)
    named_format = FORMATS_BY_NAME.get(choice.replace("-", "_"))
    begin, _, end = choice.partition(",")
    if named_format is None and not (begin and end):
        known = ", ".join(["auto", "none", *FORMATS_BY_NAME])
        raise ServerError(f"unknown --reasoning_parser {choice!r}; use one of {known}, or two tags as BEGIN,END")
    return named_format or ReasoningFormat(begin, end)


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """Parses reasoning, and the answer after it with another parser. White space next to the tags is dropped.

    A model may forget the end tag and call a tool. Text after one of ``call_begins`` in the reasoning is therefore held
    back while it reads as a call: it is reasoning if the end tag follows, and a call if the output ends without it.
    """

    reasoning_format: ReasoningFormat
    is_begun: bool  # the prompt has the first tag: the output starts inside the reasoning
    parse_answer: Parse
    call_begins: tuple[str, ...] = ()

    def parse(self, stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
        writer.is_reasoning = self.is_begun
        stream.mark()
        yield from stream.skip_space()
        has_tag = yield from stream.accept(self.reasoning_format.begin)  # a model may repeat the tag of the prompt
        if self.is_begun or has_tag:
            stream.take_marked()
            writer.is_reasoning = True
            yield from stream.skip_space()
            yield from self._parse_reasoning(stream, writer)
            writer.end_reasoning()
            yield from stream.skip_space()
        elif (yield from stream.accept(self.reasoning_format.end)):  # the prompt has both tags, the model repeats one
            stream.take_marked()
            yield from stream.skip_space()
        else:
            stream.rewind()
            stream.take_marked()
        yield from self.parse_answer(stream, writer)

    def _parse_reasoning(self, stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
        end = self.reasoning_format.end
        while marker := (yield from stream.emit_until((end, *self.call_begins), writer.add_reasoning)):
            if marker == end or (yield from self._is_unclosed_call(stream, writer, marker)):
                return

    def _is_unclosed_call(self, stream: TextStream, writer: DeltaWriter, marker: str) -> Incremental[bool]:
        """Whether a call begins with ``marker`` and no end tag follows: then go back to the marker."""
        stream.mark(len(marker))
        writer.is_undecided = True
        if (yield from self._is_call(stream, writer, marker)):
            _, end = yield from stream.read_until((self.reasoning_format.end,))
            stream.position -= len(end)
            is_unclosed = not end
        else:
            is_unclosed = False
            stream.rewind(len(marker))
        if is_unclosed:
            stream.rewind()
        held = stream.take_marked()
        writer.is_undecided = False
        writer.add_reasoning(held)
        return is_unclosed

    def _is_call(self, stream: TextStream, writer: DeltaWriter, marker: str) -> Incremental[bool]:
        """Read until it is known whether the text after ``marker`` is a call: the first delta of the format tells."""
        trial = OutputParser(self.parse_answer, DeltaWriter(writer.tools))
        deltas = trial.push(marker)
        n_left = MAX_UNDECIDED
        while not deltas and n_left > 0:
            piece, end = yield from stream.read_piece((self.reasoning_format.end,))
            stream.position -= len(end)
            if not piece:
                deltas = trial.finish()
                break
            deltas = trial.push(piece[:n_left])
            n_left -= len(piece)
        return bool(deltas) and isinstance(deltas[0], CallStart)
