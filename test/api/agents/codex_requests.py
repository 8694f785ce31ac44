"""The requests of Codex CLI 0.166 to /v1/responses: the shape and length of what it sends, in words of our own.

Codex sends its instructions as messages of the developer, stores nothing, and repeats the whole history every time.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from test.api.agents.replay import Json

PATH = "/v1/responses"
SESSION_ID = "01a1e2f4-d702-7840-ae8f-0ed275757575"
HEADERS = {
    "Accept": "text/event-stream",
    "Authorization": "Bearer none",
    "originator": "codex_exec",
    "session-id": SESSION_ID,
    "thread-id": SESSION_ID,
    "x-client-request-id": SESSION_ID,
    "x-codex-beta-features": "remote_compaction_v2",
}


def _sections(names: tuple[str, ...], n_lines: int) -> str:
    """Rules under headings, no two lines alike."""
    lines = []
    for name in names:
        lines.append(f"\n## {name}\n")
        lines += [
            f"- {name}, rule {number}: before you touch file {number * 7 % 31}, say in one sentence what you will do,"
            f" and check the result with command {number * 5 % 23}."
            for number in range(1, n_lines)
        ]
    return "\n".join(lines)


INSTRUCTIONS = "You are a coding agent in a terminal. Be precise, safe and helpful.\n" + _sections(
    ("Personality", "Plans", "Editing", "Testing", "Sandbox", "Presenting your work"), 16
)
SKILLS = "<skills_instructions>" + _sections(("Skills", "How to use skills"), 29) + "\n</skills_instructions>"
ENVIRONMENT = """<environment_context>
  <cwd>/repo</cwd>
  <shell>bash</shell>
  <current_date>2026-11-16</current_date>
  <timezone>Etc/UTC</timezone>
</environment_context>"""
PATCH_GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""


_RULES = {
    "string": "It is passed on as it is, and it must not be empty; leave it out to use the default of the session.",
    "number": "Values above the limit of the session are lowered to the limit; the default is enough for most cases.",
    "boolean": "Leave it out unless the user asks for it: the default is false.",
    "array": "One to three entries, the most important first; each must be complete without the others.",
}


def _function(name: str, description: str, *required: str, **properties: str) -> Json:
    schema = {
        "type": "object",
        "properties": {
            key: {"type": kind, "description": f"{key.replace('_', ' ').capitalize()} of {name}. {_RULES[kind]}"}
            for key, kind in properties.items()
        },
        "required": list(required),
        "additionalProperties": False,
    }
    return {"type": "function", "name": name, "description": description, "strict": False, "parameters": schema}


AGENTS: Json = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Tools for spawning and managing sub-agents.",
    "tools": [
        _function("close_agent", "Close an agent that is no longer needed.", "target", target="string"),
        _function("resume_agent", "Resume a closed agent.", "id", id="string"),
        _function("send_input", "Send a message to an agent.", "target", target="string", message="string"),
        _function("spawn_agent", "Start an agent for a task.", "message", message="string", fork_context="boolean"),
        _function("wait_agent", "Wait for agents to end.", "targets", targets="array", timeout_ms="number"),
    ],
}
TOOLS: list[Json] = [
    _function(
        "exec_command",
        "Runs a command in a PTY, returning output or a session ID for ongoing interaction.",
        "cmd",
        cmd="string",
        workdir="string",
        yield_time_ms="number",
        max_output_tokens="number",
        tty="boolean",
    ),
    _function("write_stdin", "Writes to a running session.", "session_id", session_id="number", chars="string"),
    _function("request_user_input", "Asks the user one to three questions.", "questions", questions="array"),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files. This is a FREEFORM tool, so do not wrap the patch in JSON.",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
    },
    _function("view_image", "Views a local image.", "path", path="string"),
    AGENTS,
    _function("get_goal", "The current goal."),
    _function("create_goal", "Creates a goal.", "objective", objective="string", token_budget="number"),
    _function("update_goal", "Marks the goal as reached.", "status", status="string"),
    {
        "type": "tool_search",
        "execution": "client",
        "description": "# Tool discovery\n\nSearches over deferred tools.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
    {"type": "web_search", "external_web_access": False, "search_content_types": ["text", "image"]},
]


def _message(role: str, text: str, kind: str = "input_text") -> Json:
    return {"type": "message", "id": f"msg_{uuid.uuid4()}", "role": role, "content": [{"type": kind, "text": text}]}


@dataclass
class Codex:
    """A session: its history grows with every reply."""

    model: str
    items: list[Json] = field(default_factory=list)

    def begin(self, task: str) -> None:
        self.items += [_message("developer", INSTRUCTIONS), _message("developer", SKILLS)]
        self.items += [_message("user", ENVIRONMENT), _message("user", task)]

    def request(self, **fields: Any) -> Json:
        return {
            "model": self.model,
            "input": list(self.items),
            "tools": TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": SESSION_ID,
            "text": {"verbosity": "low"},
            "client_metadata": {"session_id": SESSION_ID, "x-codex-window-id": f"{SESSION_ID}:0"},
            **fields,
        }

    def add_reply(self, events: list[Json]) -> Json:
        """Keep the items that are done, as Codex does, and return the final response."""
        self.items += [event["item"] for event in events if event["type"] == "response.output_item.done"]
        last = events[-1]
        assert last["type"] == "response.completed", last
        response: Json = last["response"]
        return response

    def add_output(self, call: Json, output: Any) -> None:
        kind = "custom_tool_call_output" if call["type"] == "custom_tool_call" else "function_call_output"
        self.items.append({"type": kind, "id": f"fco_{uuid.uuid4()}", "call_id": call["call_id"], "output": output})

    def add_user(self, text: str) -> None:
        self.items.append(_message("user", text))
