"""The documentation says what is true: its snippets run, its links lead somewhere, its commands and options exist."""

from __future__ import annotations

import argparse
import doctest
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from headwater.cli.arguments import make_parser, parse
from headwater.config import ModelConfig, ServerConfig
from headwater.engine.messages import EngineStats
from headwater.engine.options import OPTIONS, engine_config
from headwater.model.catalog import CATALOG
from headwater.serve.app import create_app
from headwater.serve.metrics import Metrics
from headwater.serve.openai.fields import NO_OPS
from headwater.serve.openai.protocol import ChatRequest, CompletionRequest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGE_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=fence)\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)


class Fenced(NamedTuple):
    line: int
    language: str
    text: str


def fenced(page: Path) -> list[Fenced]:
    """The fenced blocks of a page; ``line`` counts from 1 and is the block's first line of text."""
    text = page.read_text()
    return [
        Fenced(text.count("\n", 0, match.start("text")) + 1, match["language"], match["text"])
        for match in FENCE.finditer(text)
    ]


# ---- snippets ---------------------------------------------------------------------------------------


def run_snippets(page: Path) -> doctest.TestResults:
    """Run a page's `pycon` blocks, in order, in one namespace: a page reads as one session."""
    # Everything but the snippets is blanked, so that a failure names the page's own line.
    lines = [""] * (page.read_text().count("\n") + 1)
    for block in fenced(page):
        if block.language == "pycon":
            for number, line in enumerate(block.text.splitlines(), block.line - 1):
                lines[number] = line
    test = doctest.DocTestParser().get_doctest("\n".join(lines) + "\n", {}, page.name, str(page), 0)
    return doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_snippets_run(name: str) -> None:
    assert run_snippets(ROOT / name).failed == 0


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_every_interactive_snippet_is_marked_as_one(name: str) -> None:
    hidden = [block.line for block in fenced(ROOT / name) if ">>>" in block.text and block.language != "pycon"]
    assert hidden == []


def test_how_it_works_has_snippets() -> None:
    assert run_snippets(ROOT / "docs" / "how-it-works.md").attempted >= 20


def test_a_wrong_snippet_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```pycon\n>>> x = 1\n```\n\ntext\n\n```pycon\n>>> x + 1\n3\n```\n")
    assert run_snippets(page) == doctest.TestResults(failed=1, attempted=2)
    assert "line 10" in capsys.readouterr().out


# ---- links ------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings make, as GitHub forms them."""
    text = FENCE.sub("", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue  # leads out of the repository
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        if not other.exists() or (anchor and anchor not in anchors(other)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_links_resolve(name: str) -> None:
    assert broken_links(ROOT / name) == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `code` heading\n[a](page.md#one-code-heading) [b](page.md#two) [c](gone.md) [d](https://x.y)\n"
    )
    assert broken_links(page) == ["page.md#two", "gone.md"]


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_source_files_named_in_the_text_exist(name: str) -> None:
    text = FENCE.sub("", (ROOT / name).read_text())
    paths = re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]*|[a-z_]+/[\w./]+\.py)`", text)
    missing = [path for path in paths if not ((ROOT / path).exists() or (ROOT / "src/headwater" / path).exists())]
    assert missing == []


# ---- commands ---------------------------------------------------------------------------------------


def shell_commands(page: Path) -> Iterator[str]:
    """Each command of a page's `bash` blocks, continuation lines joined, comments and blank lines left out."""
    for block in fenced(page):
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                if line.strip() and not line.lstrip().startswith("#"):
                    yield line.strip()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def headwater_arguments(line: str) -> list[str] | None:
    """The arguments of `headwater ...`, however it is reached; None for another command."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if words and words[0].rsplit("/", 1)[-1] == "headwater":
        return words[1:]
    if words[:1] == ["make"] and (command := next((word for word in words if word in {"serve", "demo"}), None)):
        given = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
        return [command, *(shlex.split(given[0]) if given else [])]
    return None


def complaint(command: str) -> str | None:
    """What is wrong with a command shown in the documentation, as far as can be told without running it."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        unknown = [word for word in words[1:] if "=" not in word and word not in make_targets()]
        if unknown:
            return f"no such target: {unknown}"
    if words[0] == "curl":
        body = [after for word, after in itertools.pairwise(words) if word in {"-d", "--data", "--json"}]
        try:
            [json.loads(text) for text in body]
        except ValueError as error:
            return f"body is not JSON: {error}"
    arguments = headwater_arguments(command)
    if arguments is not None:
        try:
            parse(arguments)
        except SystemExit as error:
            return f"not understood by the command line (exit {error.code})"
    return None


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_commands_shown_are_understood(name: str) -> None:
    wrong = {command: why for command in shell_commands(ROOT / name) if (why := complaint(command))}
    assert wrong == {}


@pytest.mark.parametrize(
    "command",
    [
        "make nonsense",
        "headwater nonsense",
        ".venv/bin/headwater serve --no-such-option 1",
        'make serve ARGS="--no-such-option 1"',
        "curl -s http://127.0.0.1:8000/v1/models -d '{\"a\": }'",
    ],
)
def test_a_wrong_command_is_noticed(command: str) -> None:
    assert complaint(command)


def test_readme_opens_with_the_two_commands() -> None:
    assert list(shell_commands(ROOT / "README.md"))[:2] == ["make serve", "make test"]


# ---- the README's tables ----------------------------------------------------------------------------


def readme() -> str:
    return (ROOT / "README.md").read_text()


def first_column(heading: str) -> list[str]:
    """The names in backquotes in the first column of the tables under a heading of the README."""
    section = readme().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ") and "`" in line.split("|")[1]]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_readme_lists_every_no_op_field() -> None:
    listed = readme().split("<!-- no-ops -->", 1)[1].split("<!-- end -->", 1)[0]
    assert set(re.findall(r"`(\w+)`", listed)) == set(NO_OPS)


def test_readme_fields_exist() -> None:
    section = readme().split("Both generation endpoints take", 1)[1].split("\n\n", 1)[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert len(named) >= 8
    assert named <= ChatRequest.model_fields.keys() & CompletionRequest.model_fields.keys()


def test_readme_lists_every_model() -> None:
    assert first_column("Models") == list(CATALOG)


def test_metrics_named_in_the_documentation_exist() -> None:
    class Source:
        stats, info, alive = EngineStats(), SimpleNamespace(n_blocks=1, min_reusable_tokens=16), True

    shown = Metrics("model", Source()).render().decode()  # type: ignore[arg-type]
    exported = set(re.findall(r"^# TYPE (\S+)", shown, re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`(headwater_\w+)`", page.read_text())}
    assert len(named) >= 8
    assert named <= exported


def test_readme_lists_every_endpoint() -> None:
    front: Any = SimpleNamespace(access=None)
    served = {
        f"{method} {path}"
        for path, methods in create_app(front).openapi()["paths"].items()
        for method in map(str.upper, methods)
        if "{" not in path
    }
    assert set(first_column("The API")) == served


def serve_options() -> dict[str, argparse.Action]:
    """The options of `headwater serve`, by the form in which the README shows them."""
    commands = next(action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    config = engine_config(ModelConfig().model, {})
    off = {option.flag for option in OPTIONS if getattr(getattr(config, option.part), option.field) is False}

    def shown(action: argparse.Action) -> str:
        """A switch by the form that changes something."""
        is_on = isinstance(action, argparse.BooleanOptionalAction) and action.option_strings[0] not in off
        return action.option_strings[-1 if is_on else 0]

    return {
        shown(action): action
        for action in commands.choices["serve"]._actions
        if action.option_strings and action.dest != "help"
    }


def test_readme_lists_every_option() -> None:
    assert first_column("Options") == list(serve_options())


def test_defaults_in_the_readme_are_the_real_ones() -> None:
    section = readme().split("\n## Options\n", 1)[1].split("\n## ", 1)[0]
    config = engine_config(ModelConfig().model, {})
    told = {
        cells[1].strip(" `"): cells[2].strip(" `") for line in section.splitlines() if len(cells := line.split("|")) > 4
    }
    real: dict[str, object] = {
        "--model": config.model.model,
        "--host": ServerConfig().host,
        "--port": ServerConfig().port,
    }
    for option in OPTIONS:
        value = getattr(getattr(config, option.part), option.field)
        real[f"--{option.name.replace('_', '-')}"] = value
    wrong = {
        name: told[name]
        for name, value in real.items()
        if value is not None and not isinstance(value, bool) and told[name] != str(value)
    }
    assert wrong == {}
