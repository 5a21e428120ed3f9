"""Chat templates: the model folder's own Jinja program that turns messages into one text.

Rendering is transformers' to the letter (`transformers.utils.chat_template_utils`): an immutable sandbox, the same
block trimming, filters and globals. Two things are added, because a template is code that came with a download:
every turn of a loop and every macro call looks at the clock, and `*` and `**` are bounded.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import ext, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from longbatch.errors import RowError, UsageError

TIME_LIMIT_SECONDS = 5.0
# Most characters, items or bits that one `*` or `**` may make.
_MAX_PRODUCT = 1_000_000
# Where the deadline stands among a render's variables; no template can name a variable with a space.
_DEADLINE = "render deadline"


class ChatTemplate:
    """A compiled chat template.

    source: its text. hash: hex digest of the source. literals: every text the template itself can write, joined by
    null characters. time_limit: seconds that one rendering may take.
    """

    def __init__(self, source: str, *, time_limit: float = TIME_LIMIT_SECONDS) -> None:
        environment = _Environment()
        try:
            template = environment.from_string(source)
            tree = environment.parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UsageError(f"the chat template cannot be compiled: {error}") from error
        self._environment = environment
        self._root = template.root_render_func
        self._blocks = template.blocks
        # What every rendering starts with. jinja2's own `render` merges its globals anew each time, which takes twice
        # as long as a short chat's rendering itself.
        self._globals = {**template.globals, "tools": None, "documents": None, "add_generation_prompt": True}
        self.source = source
        self.hash = hashlib.sha256(source.encode()).hexdigest()
        self.time_limit = time_limit
        written = {node.data for node in tree.find_all(nodes.TemplateData)}
        written |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self.literals = "\0".join(sorted(written))

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate | None:
        """The template of a model folder: chat_template.jinja, else the one in tokenizer_config.json, else the one in
        chat_template.json; None where there is none.

        Raises UsageError for a damaged template, and for several named ones of which none is `default`.
        """
        file = model_dir / "chat_template.jinja"
        if file.is_file():
            try:
                return cls(file.read_text(encoding="utf-8"))
            except UnicodeDecodeError as error:
                raise UsageError(f"{file} is not UTF-8 text: {error}") from error
        for name in ("tokenizer_config.json", "chat_template.json"):
            file = model_dir / name
            if not file.is_file():
                continue
            try:
                settings = json.loads(file.read_bytes())
            except ValueError as error:
                raise UsageError(f"{file} is not valid JSON: {error}") from error
            found = settings.get("chat_template") if isinstance(settings, dict) else None
            if found is not None:
                return cls(_choose(found, file))
        return None

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt for a chat, up to where the model's answer begins.

        messages: dicts with role and content. variables: named special tokens and the row's template_kwargs.
        Raises RowError `template_timeout`, or `template_error` for anything that goes wrong inside the template.
        """
        deadline = time.monotonic() + self.time_limit
        values = {**self._globals, "messages": messages, **variables, _DEADLINE: deadline}
        try:
            return "".join(self._root(Context(self._environment, values, None, self._blocks)))
        except _TimeoutError:
            message = (
                f"the model's chat template ran for more than {self.time_limit:g} seconds on this row: "
                "the template is at fault, try another revision of the model"
            )
            raise RowError("template_timeout", message, field="messages") from None
        except Exception as error:  # a template is a program: it can raise anything
            raise RowError("template_error", self._explain(error), field="messages") from None

    def _explain(self, error: Exception) -> str:
        """What went wrong, without the row's own words: a message is repeated only if the template wrote all of it."""
        message = str(error)
        if isinstance(error, jinja2.TemplateError) and message and message in self.literals:
            return f"the model's chat template refuses this chat: {message}"
        kind = type(error).__name__
        return f"the model's chat template failed on this chat ({kind}): check its roles and their order"


def _choose(found: object, file: Path) -> str:
    """One template out of what `chat_template` may hold: a text, or a list or mapping of named texts."""
    if isinstance(found, str):
        return found
    if isinstance(found, list):
        found = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
    if isinstance(found, dict):
        template = found.get("default")
        if isinstance(template, str):
            return template
        names = ", ".join(sorted(str(name) for name in found))
        raise UsageError(f"{file} has several chat templates and none called default: {names}")
    raise UsageError(f"chat_template in {file} is neither a text nor a list of named texts")


# ------------------------------------------------------------------------------------------- the environment


class _TimeoutError(Exception):
    """A rendering took too long."""


class _CodeGenerator(CodeGenerator):
    """Compiles the clock checks that `_Environment._parse` plants."""

    def visit_EnvironmentAttribute(self, node: nodes.EnvironmentAttribute, frame: Frame) -> None:
        self.write(f"environment.{node.name}(context)")


class _GenerationTag(ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  (an instance attribute by its declared type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of transformers, with a clock and bounded products."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, ext.loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)  # typed as their common base
            node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("check_clock"), lineno=node.lineno))
        return tree

    def check_clock(self, context: Context) -> None:
        """Called by the compiled template at each turn of a loop."""
        if time.monotonic() > context.parent[_DEADLINE]:
            raise _TimeoutError

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            too_large = abs(left) > _MAX_PRODUCT or abs(right) > 64
        else:
            sized, factor = (left, right) if hasattr(left, "__len__") else (right, left)
            too_large = hasattr(sized, "__len__") and isinstance(factor, int) and len(sized) * factor > _MAX_PRODUCT
        if too_large:
            raise SecurityError(f"the operands of {operator} are too large")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """`dict` for templates: callable, and nothing else of the type within reach."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """Jinja's namespace without underscored attributes, which could reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: it may be an attribute's name
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a chat template cannot store underscored attributes in a namespace")
