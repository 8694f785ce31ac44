"""What drafts from n-grams are worth: the same requests with and without them, alternating, in one process.

    python -m benchmark.engine.speculation [--model_dir DIR] [--device cpu] [--tokens 256] [--repeats 3]
        [--speculative_config '{"method": "ngram", "num_speculative_tokens": 8}']

"copy" repeats a file of code, "edit" renames something in it, "edit, predicted" does the same with the file as the
prediction, "json" lists its functions by a JSON schema, and "chat" tells a story, which repeats little. All are greedy,
alone on the device. CPU time is printed too, for a machine that is busy otherwise. Tokens a step are those after the
first; a grammar forces some without drafts too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

from lightserve.offline.llm import LLM
from lightserve.text.grammar.specs import schema_grammar

CODE = '''def {0}(width, height):
    """The {0} of a rectangle."""
    result = {1}
    return result


'''
FILE = "".join(
    CODE.format(name, formula)
    for name, formula in (
        ("area", "width * height"),
        ("perimeter", "2 * (width + height)"),
        ("diagonal", "(width ** 2 + height ** 2) ** 0.5"),
        ("ratio", "width / height"),
    )
)
TASKS = {
    "copy": f"Repeat this file exactly:\n```python\n{FILE}```",
    "edit": f"Rename height to length in this file, and write the whole file:\n```python\n{FILE}```",
    "edit, predicted": f"Rename height to length in this file, and write the whole file:\n```python\n{FILE}```",
    "json": f"List the functions of this file, with their arguments and documentation:\n```python\n{FILE}```",
    "chat": "Tell me a long story about a fox, a hen and the farmer's daughter.",
}


FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "arguments": {"type": "array", "items": {"enum": ["width", "height"]}, "maxItems": 2},
        "documentation": {"type": "string", "maxLength": 60},
    },
    "required": ["name", "arguments", "documentation"],
}
SCHEMA = {"type": "array", "items": FUNCTION, "minItems": 4, "maxItems": 4}


class Run(NamedTuple):
    seconds: float
    cpu_s: float
    tokens: int
    accepted: int
    rejected: int
    token_ids: list[int]
    steps: int  # the first of them computes the prompt

    @property
    def tokens_a_step(self) -> float:
        return (self.tokens - 1) / max(self.steps - 1, 1)


def run(llm: LLM, task: str, tokens: int, has_drafts: bool) -> Run:
    fields: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "speculative": has_drafts}
    if task == "edit, predicted":
        fields["prediction_ids"] = tuple(llm.tokenizer.encode(FILE, add_special_tokens=False))
    if task == "json":
        fields["grammar"] = schema_grammar(SCHEMA)
    planner = llm._scheduler.only_group.planner
    steps = planner.num_planned
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    (generation,) = llm.chat([[{"role": "user", "content": TASKS[task]}]], **fields)
    seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    accepted, rejected = (
        (0, 0) if generation.drafts is None else (generation.drafts.accepted, generation.drafts.rejected)
    )
    return Run(
        seconds, cpu_s, len(generation.token_ids), accepted, rejected, generation.token_ids, planner.num_planned - steps
    )


def compare(llm: LLM, task: str, tokens: int, repeats: int) -> str:
    run(llm, task, 4, has_drafts=True)  # its prompt is cached from now on
    runs = {has_drafts: list[Run]() for has_drafts in (False, True)}
    for _ in range(repeats):
        for has_drafts, of_kind in runs.items():
            of_kind.append(run(llm, task, tokens, has_drafts))
    plain, drafted = runs[False][0], runs[True][0]
    cpu_ms = [statistics.median(1e3 * one.cpu_s / one.tokens for one in of_kind) for of_kind in runs.values()]
    speeds = [statistics.median(one.tokens / one.seconds for one in of_kind) for of_kind in runs.values()]
    return (
        f"{task:16} {plain.tokens:6} {plain.tokens_a_step:8.2f} {drafted.tokens_a_step:8.2f} {drafted.accepted:9}"
        f" {drafted.rejected:9} {speeds[0]:9.1f} {speeds[1]:9.1f} {cpu_ms[0]:9.1f} {cpu_ms[1]:9.1f}"
        f" {'yes' if plain.token_ids == drafted.token_ids else 'NO':>5}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir")
    parser.add_argument("--device")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--speculative_config", default='{"method": "ngram"}')
    args = parser.parse_args()
    llm = LLM(
        args.model_dir,
        device=args.device,
        speculative_config=args.speculative_config,
        max_total_token_num=4096,
        running_max_req_size=8,
    )
    print(
        f"{'task':16} {'tokens':>6} {'a step':>8} {'drafted':>8} {'accepted':>9} {'rejected':>9}"
        f" {'tok/s':>9} {'drafted':>9} {'CPU ms':>9} {'drafted':>9} {'same':>5}"
    )
    for task in TASKS:
        print(compare(llm, task, args.tokens, args.repeats), flush=True)


if __name__ == "__main__":
    main()
