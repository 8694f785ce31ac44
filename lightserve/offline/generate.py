"""``lightserve generate "What is the capital of France?"``: one response, without a server."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, NoReturn

from lightserve.config import WorkerConfig
from lightserve.config.parse import Parser, add_flags, config_from_args, server_parser
from lightserve.errors import LightserveError, with_docs
from lightserve.messages.params import GenerationParams

if TYPE_CHECKING:
    from lightserve.offline.llm import LLM

DEFAULT_PROMPT = "What is the capital of France, and what is it known for?"


class _Parser(Parser):
    def reject_unknown(self, flag: str) -> NoReturn:
        name = flag.split("=")[0]
        if any(name in action.option_strings for action in server_parser()._actions):
            self.error(f"{name} is a flag of the server: lightserve serve {flag}")
        super().reject_unknown(flag)


def arguments() -> Parser:
    parser = _Parser(prog="lightserve generate", description="Answer one prompt, without a server.")
    parser.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT, help="the prompt")
    parser.add_argument(
        "--max_new_tokens", "--max-new-tokens", type=int, default=128, help="maximum tokens of the response"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0: greedy")
    add_flags(parser, WorkerConfig)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse(argv)
    try:
        params = GenerationParams.of(max_new_tokens=args.max_new_tokens, temperature=args.temperature)
        generate(config_from_args(WorkerConfig, args), args.prompt, params)
    except LightserveError as error:
        print(f"lightserve: {with_docs(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has closed the pipe
        sys.stderr.close()
    return 0


def generate(config: WorkerConfig, prompt: str, params: GenerationParams) -> None:
    from lightserve.offline.llm import LLM  # here, because it imports torch: --help and errors in flags do not need it

    begin = time.monotonic()
    with LLM(**asdict(config)) as llm:
        _answer(llm, prompt, params, begin)


def _answer(llm: LLM, prompt: str, params: GenerationParams, begin: float) -> None:
    loaded = time.monotonic()
    if llm.tokenizer.has_chat_template:
        stream = llm.chat([{"role": "user", "content": prompt}], params)
    else:
        stream = llm.stream(prompt, params)
    print(f"> {prompt}")
    count = 0
    for out in stream:
        count += 1
        print(out.text, end="", flush=True)
    seconds = time.monotonic() - loaded
    print()
    print(f"({count} tokens, {count / seconds:.0f} tokens/s; loaded in {loaded - begin:.1f} s)", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
