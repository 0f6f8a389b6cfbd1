"""The Jinja environment that chat templates run in: Hugging Face's functions, and bounds on time and memory.

A template is part of a downloaded model, so it runs in Jinja's immutable sandbox: it reaches nothing outside. That
sandbox limits ``range`` alone; here every turn of a loop and every call counts against one budget per rendering, and
no variable may be set to a text above the limit. This stops what a faulty template does with a client's messages. It
does not stop a hostile model file from spending memory or time on purpose, with filters (``center``), ``%``,
arguments of macros that double, or recursive loops.

Source of the functions and their meaning: `chat_template_utils.py` of huggingface/transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 500_000
"""Turns of loops and calls in one rendering, all together: from 0.1 to 3 seconds of work."""
MAX_CHARS = 16_777_216
"""Characters in one rendering, and items in any sequence that an operator builds."""
MAX_BITS = 4096
"""Bits of any integer that an operator makes."""


class GenerationTag(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what the model said, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates so that loops, calls and variables are bounded; call ``begin`` before each rendering."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        # Steps taken by the rendering in this thread or task; renderings may run side by side.
        self._steps: ContextVar[list[int]] = ContextVar("steps")
        self.filters["tojson"] = to_json
        self.filters["_counted"] = self._counted
        self.filters["_bounded"] = _bounded
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)

    def begin(self) -> None:
        """Start a new budget of steps for the rendering that follows in this thread or task."""
        self._steps.set([0])

    def _step(self) -> None:
        steps = self._steps.get()
        steps[0] += 1
        if steps[0] > MAX_STEPS:
            raise SecurityError(f"more than {MAX_STEPS} loop turns and calls")

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._step()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = self._through("_counted", loop.iter)
        # Where a text grows by mistake, it grows through a variable: `set x = x ~ x`, or a block captured by `set`.
        for assign in list(tree.find_all(nodes.Assign)):
            assign.node = self._through("_bounded", assign.node)
        for block in list(tree.find_all(nodes.AssignBlock)):
            block.filter = self._through("_bounded", block.filter)
        return tree

    def _through(self, filter_name: str, node: nodes.Node | None) -> nodes.Filter:
        line = None if node is None else node.lineno
        through = nodes.Filter(node, filter_name, [], [], None, None, lineno=line)
        through.set_environment(self)
        return through

    @jinja2.pass_context
    def _counted(self, context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, each a step. (``pass_context`` keeps Jinja from running it when it compiles.)"""
        for item in items:
            self._step()
            yield item


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse operands whose result would be too large, before it is made."""
    if isinstance(left, int) and isinstance(right, int):
        bits = {"**": left.bit_length() * right, "*": left.bit_length() + right.bit_length()}.get(operator, 0)
        if bits > MAX_BITS:
            raise SecurityError(f"an integer of about {bits} bits; at most {MAX_BITS} are allowed")
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                _check_size(len(sequence) * times)
    elif isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _check_size(len(left) + len(right))


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise SecurityError(f"a text or list of {size} items; at most {MAX_CHARS} are allowed")


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        _check_size(len(value))
    return value


def raise_exception(message: object) -> None:
    """How a template refuses its input."""
    raise jinja2.TemplateError(str(message))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: no HTML escapes, characters as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
