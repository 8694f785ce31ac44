"""The fields of a chat that set variables of its chat template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lightserve.httpserver.fields.thinking import Budget, ThinkingFields
from lightserve.httpserver.http.body import Body

MAX_DOCUMENTS = 1024
MAX_VARIABLES = 64

Variables = Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)]
Effort = Annotated[str, Field(max_length=32)]
Document = Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)]


class Thinking(Body):
    """As on the APIs of Anthropic, DeepSeek, Moonshot and Z.ai."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Budget | None = None


class ReasoningSettings(Body):
    """As on OpenRouter and on /v1/responses."""

    enabled: bool | None = None
    effort: Effort | None = None
    max_tokens: Budget | None = None
    exclude: bool | None = None


def _thinking(value: Any) -> Any:
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


def _reasoning(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else value


class TemplateFields(ThinkingFields):
    chat_template_kwargs: Variables | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: Annotated[Thinking, BeforeValidator(_thinking, json_schema_input_type=bool | Thinking)] | None = None
    reasoning: (
        Annotated[ReasoningSettings, BeforeValidator(_reasoning, json_schema_input_type=bool | ReasoningSettings)]
        | None
    ) = None
    include_reasoning: bool | None = None  # false: the response leaves it out
    documents: Annotated[list[Document], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = Field(
        default=None, description="texts for templates that take documents"
    )

    @model_validator(mode="after")
    def _spread_objects(self) -> TemplateFields:
        """The parts of ``thinking`` and ``reasoning`` are other names of fields that count if both are set."""
        settings = self.reasoning or ReasoningSettings()
        budgets = [self.thinking.budget_tokens if self.thinking else None, settings.max_tokens]
        for budget in budgets:
            if self.thinking_token_budget is None:
                self.thinking_token_budget = budget
        if self.reasoning_effort is None:
            self.reasoning_effort = settings.effort
        if self.include_reasoning is None and settings.exclude is not None:
            self.include_reasoning = not settings.exclude
        return self

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to reason; None: the request does not say."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            return self.thinking.type == "enabled"
        if self.reasoning is not None and self.reasoning.enabled is not None:
            return self.reasoning.enabled
        return False if self.reasoning_effort == "none" else None

    def template_variables(self) -> dict[str, Any]:
        """The variables that these fields set; chat_template_kwargs count before the other fields."""
        variables: dict[str, Any] = {}
        if self.thinks is not None:
            variables |= {"enable_thinking": self.thinks, "thinking": self.thinks}  # Qwen's and DeepSeek's names
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        return variables | (self.chat_template_kwargs or {})
