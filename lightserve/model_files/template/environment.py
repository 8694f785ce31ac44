"""The Jinja environment of chat templates: the one that transformers has, in a sandbox and within a budget."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterator
from datetime import datetime
from types import GeneratorType
from typing import Any

from jinja2 import TemplateAssertionError, TemplateError, Undefined, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg

from lightserve.model_files.template import guards
from lightserve.model_files.template.budget import PLAIN, RenderBudget

MAX_INDENT = 64  # of JSON
MAX_DATE_FORMAT = 256  # characters
CALL_BYTES = 128  # of what a call may make without a result
STEP = "count a step"  # a filter that a template cannot name in an expression
INTERNAL = ("_loop_vars", "_block_vars")  # arguments that Jinja adds to calls
METHOD_TYPES = tuple(guards.METHODS)
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda item, container: item in container,
    "notin": lambda item, container: item not in container,
}
REMOVED_GLOBALS = frozenset({"lipsum"})
# the names that every template can use
GLOBALS = frozenset({"raise_exception", "strftime_now", *DEFAULT_NAMESPACE})


class BudgetContext(Context):
    """The variables of one rendering, and what it may still cost."""

    budget: RenderBudget  # set before the template runs

    def derived(self, locals: dict[str, Any] | None = None) -> BudgetContext:
        context = super().derived(locals)
        assert isinstance(context, BudgetContext)
        context.budget = self.budget
        return context


class BudgetCodeGenerator(CodeGenerator):
    """Python code that pays for what operators make, and before comparisons and tuples."""

    def visit_Filter(self, node: nodes.Filter, frame: Frame) -> None:
        if node.name == STEP and isinstance(node.node, nodes.Const):
            self.write(f"context.budget.step({node.node.value})")
        else:
            super().visit_Filter(node, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        """Only the whole sum is paid for: its parts are not longer."""
        self.write("context.budget.made(")
        self._write_sum(node, frame)
        self.write(")")

    def _write_sum(self, node: nodes.Expr, frame: Frame) -> None:
        if not isinstance(node, nodes.Add):
            self.visit(node, frame)
            return
        self.write("(")
        self._write_sum(node.left, frame)
        self.write(" + ")
        self._write_sum(node.right, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_values(context, (")
        for value in node.nodes:
            self.visit(value, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """A comparison with a constant looks into no nested value."""
        if len(node.ops) == 1 and (_is_plain(node.expr) or _is_plain(node.ops[0].expr)):
            super().visit_Compare(node, frame)
            return
        self.write("environment.compare(context, [")
        for operand in (node.expr, *(comparison.expr for comparison in node.ops)):
            self.visit(operand, frame)
            self.write(", ")
        self.write(f"], {[comparison.op for comparison in node.ops]!r})")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("context.budget.made(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        """The hash of a tuple looks at all tuples in it."""
        is_made = node.ctx == "load" and not _is_plain(node)
        self.write("context.budget.walk(" if is_made else "")
        super().visit_Tuple(node, frame)
        self.write(")" if is_made else "")


def _is_plain(node: nodes.Expr) -> bool:
    """Whether it is a constant, or contains nothing else."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = BudgetCodeGenerator
    context_class = BudgetContext
    intercepted_binops = frozenset(guards.BINARY)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
            finalize=_finalize,
            optimized=False,  # the optimiser computes constants without a budget
        )
        self.filters["tojson"] = _to_json
        self.filters = {
            name: _within_budget(name, function)
            for name, function in self.filters.items()
            if name not in guards.REMOVED_FILTERS
        }
        self.filters[STEP] = bool  # BudgetCodeGenerator writes it in another way
        tests: dict[str, Any] = self.tests
        tests |= {name: _walking(tests[name]) for name in guards.COMPARING_TESTS}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        for name in REMOVED_GLOBALS:
            del self.globals[name]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _add_steps(template)
        template.set_environment(self)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        assert isinstance(context, BudgetContext)
        return guards.BINARY[operator](context.budget, left, right)

    def concat_values(self, context: BudgetContext, values: tuple[Any, ...]) -> str:
        """The operator ~."""
        budget = context.budget
        text: str = budget.made("".join([str(budget.walk(value)) for value in values]))
        return text

    def compare(self, context: BudgetContext, operands: list[Any], names: list[str]) -> Any:
        """``a < b < c``, of which each pair must be so."""
        result: Any = True
        for left, name, right in zip(operands, names, operands[1:], strict=False):
            if type(left) not in PLAIN and type(right) not in PLAIN and not isinstance(right, dict):
                context.budget.walk([left, right])
            result = COMPARISONS[name](left, right)
            if not result:
                break
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        if wrapper is not None:
            wrapper.__self__ = value.__self__  # type: ignore[attr-defined]  # for ``call``
        return wrapper

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(context, BudgetContext)
        context.budget.step(CALL_BYTES)
        _check_method(context.budget, function, args, kwargs)
        return context.budget.made(super().call(context, function, *args, **kwargs))


def _check_method(budget: RenderBudget, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check a call of a method of a value. Macros and the functions of Jinja are made of steps."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, str):
        if name not in guards.FREE_STRING_METHODS:
            _guard_of(name)(budget, owner, *args, **{key: kwargs[key] for key in kwargs if key not in INTERNAL})
    elif isinstance(owner, METHOD_TYPES):
        kind = next(method_type for method_type in METHOD_TYPES if isinstance(owner, method_type))
        if name not in guards.METHODS[kind]:
            raise SecurityError(f"the method {name!r} of {kind.__name__} is not available in a chat template")
        if name in ("count", "index"):
            budget.walk([owner, *args])
    elif name == "changed":  # of a loop: it compares values
        budget.walk(args)


def _guard_of(method: str) -> guards.Guard:
    guard = guards.STRING_METHODS.get(method)
    if guard is None:
        raise SecurityError(f"the method {method!r} of a text is not available in a chat template")
    return guard


def _within_budget(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with steps and a check of what it is given."""
    guard = guards.FILTERS.get(name)
    pass_arg = _PassArg.from_obj(function)
    iterable, walks = _iterable_for(name), name not in guards.SHALLOW_FILTERS

    @pass_context
    @functools.wraps(function, updated=())
    def limited(context: BudgetContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        budget.step()
        if value and not isinstance(value, Undefined):
            value = iterable(budget, value)
        if walks:
            budget.walk([value, *args, *kwargs.values()] if args or kwargs else value)
        if guard is not None:
            guard(budget, value, *args, **kwargs)
        result = function(*_passed(pass_arg, context), value, *args, **kwargs)
        return budget.iterate(result) if isinstance(result, GeneratorType) else budget.made(result)

    return limited


def _iterable_for(name: str) -> Callable[[RenderBudget, Any], Any]:
    """What a filter gets in place of its value, so that the items are counted."""
    if name in guards.LAZY_FILTERS:
        return RenderBudget.iterate
    if name in guards.LISTING_FILTERS:
        return lambda budget, value: list(budget.iterate(value))
    return lambda budget, value: value


def _passed(pass_arg: _PassArg | None, context: BudgetContext) -> tuple[Any, ...]:
    """What a filter gets before its value."""
    if pass_arg is _PassArg.context:
        return (context,)
    if pass_arg is _PassArg.eval_context:
        return (context.eval_ctx,)
    return (context.environment,) if pass_arg is _PassArg.environment else ()


def _walking(test: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def walking(context: BudgetContext, value: Any, other: Any) -> Any:
        budget = context.budget
        budget.step()
        return test(budget.walk(value), budget.walk(other))

    return walking


def _add_steps(template: nodes.Template) -> None:
    """Count each iteration of a loop, also those that its condition leaves out. Calls are counted by ``call``."""
    if template.find(nodes.ScopedEvalContextModifier):
        raise TemplateAssertionError("autoescape is not available in a chat template", 1)
    for loop in list(template.find_all(nodes.For)):
        size = sum(len(data.data.encode()) for data in loop.find_all(nodes.TemplateData))
        loop.body.insert(0, nodes.ExprStmt(_counted(size), lineno=loop.lineno))
        if loop.test is not None:
            loop.test = nodes.And(_counted(0), loop.test, lineno=loop.lineno)
    for output in template.find_all(nodes.Output):
        output.nodes = [_as_data(node) for node in output.nodes]


def _counted(size: int) -> nodes.Filter:
    return nodes.Filter(nodes.Const(size), STEP, [], [], None, None)


def _as_data(node: nodes.Expr) -> nodes.Expr:
    """A constant text is written as it is, like the text around it."""
    return nodes.TemplateData(node.value) if isinstance(node, nodes.Const) and isinstance(node.value, str) else node


@pass_context
def _finalize(context: BudgetContext, value: Any) -> Any:
    """A message without content adds no text, not the word None."""
    if value is None:
        return ""
    return context.budget.text(value)


class _GenerationBlock(Extension):
    """``{% generation %}`` marks assistant text for training. Here its content is plain text."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _to_json(
    context: BudgetContext,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    if (indent or 0) > MAX_INDENT or sum(map(len, separators or ())) > MAX_INDENT:
        raise SecurityError(f"tojson: indent and separators must be at most {MAX_INDENT}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return encoder.encode(value) if indent is None else "".join(_paid(context.budget, encoder.iterencode(value)))


def _paid(budget: RenderBudget, pieces: Iterator[str]) -> Iterator[str]:
    """Lines of nested JSON are indented, so they may be much longer than what is in them."""
    for piece in pieces:
        budget.spend(len(piece))
        yield piece


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(date_format: str) -> str:
    if len(date_format) > MAX_DATE_FORMAT:
        raise SecurityError(f"strftime_now: a format must have at most {MAX_DATE_FORMAT} characters")
    return datetime.now().strftime(date_format)
