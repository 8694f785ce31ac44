"""Requests as Claude Code 2.1.197 sends them: fields, order, lengths and schemas; the prose is ours."""

from __future__ import annotations

import hashlib
from typing import Any

from pydantic_core import from_json

Json = dict[str, Any]

PATH = "/v1/messages?beta=true"
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,effort-2025-11-24",
    "x-app": "cli",
}
CACHED: Json = {"cache_control": {"type": "ephemeral"}}
STRING: Json = {"type": "string"}
BOOLEAN: Json = {"type": "boolean"}
NUMBER: Json = {"type": "number"}
STRINGS: Json = {"type": "array", "items": STRING}

IDENTITY = "You are Claude Code, Anthropic's official CLI for Claude."
RULES = (
    "Read a file before you change it, and keep to the style that its code has.",
    "Run the tests of what you changed, and say which ones you did not run.",
    "Never write a secret into a file, a log line or a commit message.",
    "Prefer the tool made for a task over a shell command that does the same.",
    "Send calls that do not depend on each other together, in one message.",
    "Ask before an action that cannot be undone, such as deleting a branch.",
    "Answer in a few lines unless the user asks for more; the terminal is narrow.",
    "Name places in code as path:line, so that the user can open them.",
    "Do not commit unless the user asks for a commit.",
    "If a command fails, read its output before you run it again.",
)
TOPICS = ("Tone", "Tools", "Tasks", "Code", "Safety", "Git", "Tests", "Hooks", "Plans", "Reviews", "Memory", "Output")
AGENTS = "Available agent types for the Agent tool:\n- Explore: searches many files and returns the conclusion.\n"


def _system_prompt() -> str:
    """Of some 12,000 characters, with the sections and the environment that the agent adds."""
    sections = [
        f"# {topic}\n" + "\n".join([f" - {topic}, rule {i}: {rule}" for i, rule in enumerate(RULES, 1)])
        for topic in TOPICS
    ]
    environment = "# Environment\n - Working directory: /repo\n - Platform: linux\n - Is a git repository: true\n"
    status = "\n".join([f" M src/module_{i:03}.py" for i in range(40)])
    return "\n\n".join(["\nYou are an interactive agent.", *sections, environment, f"gitStatus:\n{status}"])


SYSTEM_PROMPT = _system_prompt()


def tool(name: str, description: str, required: tuple[str, ...] = (), /, **properties: Json) -> Json:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {key: {"description": f"{key} of {name}", **value} for key, value in properties.items()},
        **({"required": list(required)} if required else {}),
        "additionalProperties": False,
    }
    return {"name": name, "description": f"{description}\n\nUsage:\n- {RULES[3]}\n- {RULES[4]}", "input_schema": schema}


STATUS: Json = {"anyOf": [{"type": "string", "enum": ["pending", "completed"]}, {"type": "string", "const": "deleted"}]}
FINDINGS: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"file": STRING, "line": {"type": "integer"}, "severity": {"enum": ["low", "high"]}},
        "required": ["file", "severity"],
        "additionalProperties": False,
    },
}
TOOLS = [
    tool("Agent", "Start a subagent.", ("prompt",), prompt=STRING, subagent_type=STRING, run_in_background=BOOLEAN),
    tool("Bash", "Run a command.", ("command",), command=STRING, timeout=NUMBER, description=STRING),
    tool("CronCreate", "Schedule a prompt.", ("cron", "prompt"), cron=STRING, prompt=STRING, recurring=BOOLEAN),
    tool("CronDelete", "Delete a schedule.", ("id",), id=STRING),
    tool("CronList", "List schedules."),
    tool(
        "Edit",
        "Replace text in a file.",
        ("file_path", "old_string", "new_string"),
        file_path=STRING,
        old_string=STRING,
        new_string=STRING,
        replace_all={"type": "boolean", "default": False},
    ),
    tool("EnterWorktree", "Work in a worktree.", name=STRING),
    tool("ExitWorktree", "Leave the worktree.", ("action",), action={"type": "string", "enum": ["keep", "remove"]}),
    tool("Glob", "Find files.", ("pattern",), pattern=STRING, path=STRING),
    tool("Grep", "Search in files.", ("pattern",), pattern=STRING, path=STRING, glob=STRING, multiline=BOOLEAN),
    tool("NotebookEdit", "Edit a cell.", ("notebook_path", "new_source"), notebook_path=STRING, new_source=STRING),
    tool(
        "Read",
        "Read a file.",
        ("file_path",),
        file_path=STRING,
        offset={"type": "integer", "minimum": 0, "maximum": 9007199254740991},
        limit={"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
    ),
    tool("ReportFindings", "Report a review.", ("findings",), findings=FINDINGS),
    tool("SendMessage", "Send to an agent.", ("to", "message"), to=STRING, message=STRING),
    tool("Skill", "Run a skill.", ("skill",), skill=STRING, args=STRING),
    tool("TaskCreate", "Add a task.", ("subject",), subject=STRING, description=STRING, metadata={"type": "object"}),
    tool("TaskGet", "Show a task.", ("taskId",), taskId=STRING),
    tool("TaskList", "List tasks."),
    tool("TaskStop", "Stop a task.", task_id=STRING),
    tool("TaskUpdate", "Change a task.", ("taskId",), taskId=STRING, status=STATUS, addBlocks=STRINGS),
    tool("ToolSearch", "Find deferred tools.", ("query",), query=STRING, max_results={"type": "number", "default": 5}),
    tool("WebFetch", "Fetch a page.", ("url", "prompt"), url={"type": "string", "format": "uri"}, prompt=STRING),
    tool("WebSearch", "Search the web.", ("query",), query={"type": "string", "minLength": 2}, allowed_domains=STRINGS),
    tool("Write", "Write a file.", ("file_path", "content"), file_path=STRING, content=STRING),
    tool("mcp__issues__create_issue", "Open an issue.", ("title",), title=STRING, labels=STRINGS)
    | {"defer_loading": True},
]
REMINDER = (
    "<system-reminder>\nAs you answer the user's questions, you can use the following context:\n# currentDate\n"
    "Today's date is 2026-11-16.\n</system-reminder>\n\n"
)


class ClaudeCode:
    """A conversation as the agent keeps it, and the request for its next turn."""

    def __init__(self, model: str, system_prompt: str = SYSTEM_PROMPT, tools: list[Json] | None = None) -> None:
        self._model = model
        self._system_prompt = system_prompt
        self._tools = TOOLS if tools is None else tools
        self._requests = 0
        self.messages: list[Json] = []

    def begin(self, task: str) -> None:
        self.messages = [
            {"role": "user", "content": [_text(REMINDER), _text(task)]},
            {"role": "system", "content": AGENTS},
        ]

    def add_user(self, *blocks: Json) -> None:
        self.messages.append({"role": "user", "content": list(blocks)})

    def request(self) -> Json:
        """The body; the last block of the conversation ends the part that should be cached."""
        self._requests += 1
        build = hashlib.sha256(str(self._requests).encode()).hexdigest()[:5]
        header = f"x-anthropic-billing-header: cc_version=2.1.197.{build[:3]}; cc_entrypoint=cli; cch={build};"
        last = self.messages[-1]
        content = last["content"]
        marked = [*content[:-1], content[-1] | CACHED] if isinstance(content, list) else [_text(content) | CACHED]
        return {
            "model": self._model,
            "messages": [*self.messages[:-1], last | {"content": marked}],
            "system": [_text(header), _text(IDENTITY) | CACHED, _text(self._system_prompt) | CACHED],
            "tools": self._tools,
            "metadata": {"user_id": '{"device_id":"6bf99f08","account_uuid":"","session_id":"8930fae4"}'},
            "max_tokens": 32000,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "stream": True,
        }

    def add_reply(self, events: list[Json]) -> Json:
        """Fold a stream into a message, as the agent does, and keep it."""
        message: Json = {}
        blocks: list[Json] = []
        for event in events:
            match event:
                case {"type": "message_start"}:
                    message = event["message"]
                case {"type": "content_block_start"}:
                    blocks.append(event["content_block"] | {"partial": ""})
                case {"type": "content_block_delta", "delta": delta}:
                    _add_delta(blocks[event["index"]], delta)
                case {"type": "message_delta"}:
                    message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
        content = [_whole(block) for block in blocks]
        self.messages.append({"role": "assistant", "content": content})
        return message | {"content": content}


def tool_result(call: Json, content: Any, is_error: bool = False) -> Json:
    return {"tool_use_id": call["id"], "type": "tool_result", "content": content, "is_error": is_error}


def _text(value: str) -> Json:
    return {"type": "text", "text": value}


def _add_delta(block: Json, delta: Json) -> None:
    kind = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(delta["type"])
    if kind is None:
        block["partial"] += delta["partial_json"]
    else:
        block[kind] += delta[kind]


def _whole(block: Json) -> Json:
    partial = block.pop("partial")
    return block | ({"input": from_json(partial or "{}", allow_partial=True)} if block["type"] == "tool_use" else {})
