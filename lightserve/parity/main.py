"""``lightserve parity MODEL``: compares logits and greedy text with those of transformers.

Exit codes: 0 if they agree up to rounding, 1 if they differ, 2 if they cannot be compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightserve.config import WorkerConfig
from lightserve.config.option import changed_options
from lightserve.config.parse import Parser, add_flags, config_from_args
from lightserve.errors import LightserveError, OptionError, with_docs
from lightserve.model_files.transformers_config import is_installed
from lightserve.utils.extras import install_command

if TYPE_CHECKING:
    from lightserve.parity.run import Parity, PromptResult

# one rank in this process is compared, without KV tiers and adapters
OF_THE_SERVER = (
    *("tp", "pp", "ep", "enable_dp_attention", "attention_dp", "disable_custom_allreduce"),
    *("kv_ram_gb", "kv_disk_gb", "kv_disk_dir", "kv_remote", "task", "pooling", "score_template", "load_format"),
    *("lora_modules", "lora_dir", "max_loras", "max_cpu_loras", "max_lora_rank", "merge_lora"),
)
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
)
POOL_TOKENS = 8192  # enough for all prompts, in less memory than a server takes
SAME, DIFFERENT, NOT_COMPARED = 0, 1, 2
NAME_WIDTH = 32
COLUMNS = ("tokens", "max diff", "mean diff", "KL", "argmax", "greedy text")


def arguments() -> Parser:
    parser = Parser(prog="lightserve parity", description="Compare a model with transformers: logits and greedy text.")
    parser.add_argument("model", nargs="?", help="as for `lightserve serve`; default: SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="prompts: one in each line, or a JSON list")
    parser.add_argument("--text", type=Path, metavar="FILE", help="also compare the perplexity of this text")
    parser.add_argument(
        "--max_new_tokens", "--max-new-tokens", type=int, default=16, help="greedy tokens behind each prompt"
    )
    add_flags(parser, WorkerConfig)
    parser.hide(OF_THE_SERVER)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse(argv)
    try:
        return _run(args)
    except LightserveError as error:
        print(f"lightserve: {with_docs(error)}", file=sys.stderr)
        return NOT_COMPARED


def _run(args: Any) -> int:
    if args.max_new_tokens < 1:
        raise OptionError(f"max_new_tokens={args.max_new_tokens}: must be at least 1")
    if args.model is not None and args.model_dir not in (None, args.model):
        raise OptionError(f"two models: {args.model} and --model_dir {args.model_dir}; name one")
    if not is_installed():
        raise LightserveError(f"parity needs the package transformers; run: {install_command('hf')}")
    prompts = list(PROMPTS) if args.prompts is None else read_prompts(args.prompts)
    text = "" if args.text is None else _read(args.text, "--text")
    config = _config(args)
    from lightserve.model_files.source import resolve
    from lightserve.offline.llm import LLM  # here, because it imports torch: --help and errors do not need it
    from lightserve.parity.reference import Reference
    from lightserve.parity.run import compare

    llm = LLM(**asdict(config))
    source = resolve(config.model_dir, trusts_code=config.trust_remote_code)
    reference = Reference(source, llm.worker.model.device)
    print(f"{source.name}: LightServe {llm.worker.dtype_and_device}, transformers in float32")
    parity = compare(llm, reference, prompts, args.max_new_tokens, text)
    print("\n".join(table(parity)))
    return DIFFERENT if parity.differences() else SAME


def _config(args: Any) -> WorkerConfig:
    """The flags of the worker, with one KV pool for all layers: logits are computed in slots of its beginning."""
    config = config_from_args(WorkerConfig, args)
    if unusable := [name for name in changed_options(config) if name in OF_THE_SERVER]:
        raise OptionError(f"--{unusable[0]}: parity compares the weights of a text model on one device; leave it out")
    pool_tokens = config.max_total_token_num or POOL_TOKENS
    return replace(
        config,
        model_dir=args.model or config.model_dir,
        max_total_token_num=pool_tokens,
        max_windowed_token_num=config.max_windowed_token_num or 0,
    )


def read_prompts(path: Path) -> list[str | list[int]]:
    """Texts, or lists of token ids for a model without a tokenizer."""
    text = _read(path, "--prompts")
    if not text.lstrip().startswith("["):
        prompts: list[Any] = [line for line in text.splitlines() if line.strip()]
    else:
        try:
            prompts = json.loads(text)
        except ValueError as error:
            raise OptionError(f"--prompts {path}: not readable as JSON ({error}); correct it") from error
    if not prompts or not all(map(_is_prompt, prompts)):
        raise OptionError(f"--prompts {path}: wanted lines, or a JSON list of texts or of lists of token ids")
    return prompts


def _is_prompt(prompt: Any) -> bool:
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and prompt != [] and all(isinstance(token, int) and token >= 0 for token in prompt)
    )


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OptionError(f"{flag} {path}: cannot be read ({error}); name a text file in UTF-8") from error


def table(parity: Parity) -> list[str]:
    """The figures of every prompt and of all, the perplexity, and the verdict."""
    lines = ["", _line("prompt", *COLUMNS), *map(_prompt_line, parity.prompts)]
    total = parity.all_prompts
    same = sum(prompt.text_differs_at is None for prompt in parity.prompts)
    figures = (f"{total.max_diff:.1e}", f"{total.mean_diff:.1e}", f"{total.kl:.1e}", f"{total.agreement:.1%}")
    lines += [_line("all", str(total.rows), *figures, f"{same} of {len(parity.prompts)} the same"), ""]
    if parity.text is not None:
        text = parity.text
        lines.append(
            f"perplexity of {text.tokens:,} tokens: {text.ours:.4f}, of transformers {text.theirs:.4f} "
            f"({text.change:+.3%})"
        )
    reasons = parity.differences()
    limit = f" ({total.relative:.1e} of the largest logit, KL {total.kl:.1e})"
    return [*lines, "verdict: " + (f"they differ: {'; '.join(reasons)}" if reasons else f"the same{limit}")]


def _prompt_line(prompt: PromptResult) -> str:
    logits = prompt.logits
    text = "the same" if prompt.text_differs_at is None else f"differs at token {prompt.text_differs_at}"
    return _line(
        prompt.name,
        f"{prompt.prompt_tokens}+{prompt.new_tokens}",
        f"{logits.max_diff:.1e}",
        f"{logits.mean_diff:.1e}",
        f"{logits.kl:.1e}",
        f"{logits.agreement:.1%}",
        text + (", a tie" if prompt.is_tie else ""),
    )


def _line(name: str, *values: str) -> str:
    shown = " ".join(name.split())
    shown = shown if len(shown) <= NAME_WIDTH else shown[: NAME_WIDTH - 3] + "..."
    *figures, text = values
    return f"{shown:{NAME_WIDTH}} " + " ".join(f"{figure:>9}" for figure in figures) + f"  {text}"
