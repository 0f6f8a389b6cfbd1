"""The one-direction rule: which part of Headwater may import which, checked by reading the source.

The rule is docs/architecture.md's: errors, config and types are open to all; `cache <- sched <- engine` and so on.
Every import counts, also one inside a function, under TYPE_CHECKING, or by `importlib.import_module("...")`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "headwater"

FOUNDATION = frozenset({"errors", "config", "types"})
"""Open to every part; among themselves in any order without a cycle (Python itself refuses those)."""

BELOW: dict[str, frozenset[str]] = {
    "step": frozenset(),
    "gguf_file": frozenset(),
    "cache": frozenset(),
    "sched": frozenset({"cache", "step"}),
    "kernels": frozenset(),
    "model": frozenset({"kernels", "gguf_file"}),
    "run": frozenset({"model", "step"}),
    "text": frozenset({"gguf_file"}),
    "tiers": frozenset({"cache"}),
    "events": frozenset(),
    "explaining": frozenset({"text"}),
    "engine": frozenset({"sched", "run", "text", "tiers", "events"}),
    "serve": frozenset({"engine", "explaining"}),
    "cluster": frozenset({"serve"}),
    "sim": frozenset({"cache", "sched"}),
    "bench": frozenset(),
    "eval": frozenset({"engine"}),
    "cli": frozenset({"cluster", "serve", "sim", "bench", "eval"}),
}
"""The parts directly below each part. A part may import what is below it, at any depth."""

LIGHT = frozenset({"errors", "config", "types", "step", "cache", "sched", "sim"})
"""Parts that must load in an instant: no tensor library, in them or in what they import."""

TENSOR_LIBRARIES = frozenset({"torch", "numpy"})


class Import(NamedTuple):
    line: int
    module: str
    """Dotted name as it would stand after `import`."""


def reachable(part: str) -> frozenset[str]:
    """Every part that ``part`` may import."""
    found: set[str] = set()
    todo = [part]
    while todo:
        for below in BELOW[todo.pop()] - found:
            found.add(below)
            todo.append(below)
    return frozenset(found) | FOUNDATION


def imports_of(path: Path, package: str) -> Iterator[Import]:
    """All imports in one file; ``package`` is the dotted package that relative imports start from."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                start = ".".join(parents[: len(parents) - node.level + 1])
                base = f"{start}.{base}" if base else start
            for alias in node.names:
                yield Import(node.lineno, f"{base}.{alias.name}")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = ast.unparse(node.func)
            if name.split(".")[-1] in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield Import(node.lineno, node.args[0].value)


def part_of(path: Path, root: Path) -> str:
    """`cache` for cache/key.py, `step` for step.py, and the empty name for the package's own __init__.py."""
    first = path.relative_to(root).parts[0].removesuffix(".py")
    return {"__init__": "", "__main__": "cli"}.get(first, first)


def violations(root: Path) -> list[str]:
    """Every broken rule in the package at ``root`` (the folder that is `headwater`), as `file:line what`."""
    found: list[str] = []
    parts = {part_of(path, root) for path in root.rglob("*.py")} - {""}
    for path in sorted(root.rglob("*.py")):
        part = part_of(path, root)
        if part == "":
            continue  # the public surface may name anything; tests/test_public_surface.py holds it
        where = path.relative_to(root)
        if part not in BELOW and part not in FOUNDATION:
            found.append(f"{where}:1 '{part}' is no known part: say in BELOW what it may import")
            continue
        allowed = FOUNDATION if part in FOUNDATION else reachable(part) | {part}
        package = ".".join(["headwater", *path.relative_to(root).parts[:-1]])
        for line, module in imports_of(path, package):
            top, *rest = module.split(".")
            if top == "headwater":
                target = rest[0] if rest and rest[0] in parts | BELOW.keys() | FOUNDATION else ""
                if target == "" and part != "cli":
                    found.append(f"{where}:{line} {part} imports the whole package (it loads every part)")
                elif target not in allowed and target != "":
                    found.append(f"{where}:{line} {part} may not import {target}")
            elif top in TENSOR_LIBRARIES and part in LIGHT:
                found.append(f"{where}:{line} {part} may not import {top}")
    return found


# ---- the real tree ------------------------------------------------------------------------------


def test_source_keeps_the_direction() -> None:
    assert violations(SOURCE) == []


def test_the_walk_saw_the_source() -> None:
    modules = [path for path in SOURCE.rglob("*.py") if path.read_text().strip()]
    seen = sum(1 for path in modules for _ in imports_of(path, "headwater"))
    assert {"errors", "cache", "sched", "run", "engine", "serve"} <= {part_of(path, SOURCE) for path in modules}
    assert seen > len(modules)


def test_cache_and_scheduler_load_without_tensors_or_http() -> None:
    modules = [
        ".".join(["headwater", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
        for part in ("cache", "sched")
        for path in sorted((SOURCE / part).rglob("*.py"))
    ]
    heavy = ("torch", "numpy", "transformers", "fastapi", "zmq")
    code = (
        f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
        f"print([h for h in {heavy!r} if h in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout.strip(), done.returncode) == ("", "[]", 0)


def test_source_imports_only_what_pyproject_declares() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [line for name in extras.keys() - {"dev"} for line in extras[name]]
    declared = {re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in wanted}
    declared |= {"starlette", "pydantic", "pydantic-core"}  # FastAPI is made of these; they come with it
    owners = packages_distributions()
    undeclared = set()
    for path in sorted(SOURCE.rglob("*.py")):
        for line, module in imports_of(path, "headwater"):
            top = module.split(".")[0]
            if top == "headwater" or top in sys.stdlib_module_names:
                continue
            names = {name.lower().replace("_", "-") for name in owners.get(top, [top])}
            if not names & declared:
                undeclared.add(f"{path.relative_to(SOURCE)}:{line} {top}")
    assert undeclared == set()


# ---- the checker itself, on small trees that break one rule each -------------------------------------


def tree(tmp_path: Path, files: dict[str, str]) -> Path:
    root = tmp_path / "headwater"
    for name, text in {"__init__.py": "", "types.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sched/a.py", "from headwater.cache.prefix import PrefixCache\nfrom headwater import types, step\n"),
        ("engine/a.py", "from headwater.cache import key\nfrom headwater.model.catalog import resolve\n"),
        ("serve/openai/a.py", "from ..metrics import Metrics\nfrom headwater.engine import client\n"),
        ("cli.py", "import headwater\nfrom headwater import __version__\nfrom headwater.text import tokenizer\n"),
        ("cache/a.py", "from . import key\nfrom .key import TokenChain\nimport hashlib\n"),
        ("run/a.py", "import torch\nfrom headwater.step import StepPlan\n"),
        ("__init__.py", "from headwater.engine.llm import LLM\n"),
        ("sim/a.py", "from headwater.sched.scheduler import Scheduler\n"),
    ],
)
def test_checker_accepts(tmp_path: Path, name: str, text: str) -> None:
    assert violations(tree(tmp_path, {name: text, "step.py": ""})) == []


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("sched/a.py", "from headwater.run.runner import Runner\n", "sched may not import run"),
        ("run/a.py", "from headwater.sched import scheduler\n", "run may not import sched"),
        ("run/a.py", "def f():\n    import headwater.sched.scheduler\n", "run may not import sched"),
        ("cache/a.py", "from headwater import sched\n", "cache may not import sched"),
        ("cache/a.py", "from ..sched import planner\n", "cache may not import sched"),
        ("cache/deep/a.py", "from ...sched.planner import Planner\n", "cache may not import sched"),
        ("cache/a.py", "from .. import step\n", "cache may not import step"),
        ("cache/a.py", "import torch\n", "cache may not import torch"),
        ("cache/a.py", "from torch.nn import functional\n", "cache may not import torch"),
        ("sched/a.py", "if TYPE_CHECKING:\n    import torch as t\n", "sched may not import torch"),
        ("sched/a.py", "import numpy as np\n", "sched may not import numpy"),
        ("sim/a.py", "import torch\n", "sim may not import torch"),
        ("sim/a.py", "from headwater.engine import core\n", "sim may not import engine"),
        ("types.py", "import torch\n", "types may not import torch"),
        ("errors.py", "from headwater.cache import key\n", "errors may not import cache"),
        ("step.py", "from headwater.sched import planner\n", "step may not import sched"),
        ("bench/a.py", "from headwater.engine.llm import LLM\n", "bench may not import engine"),
        ("kernels/a.py", "from headwater.model import spec\n", "kernels may not import model"),
        ("text/a.py", "from headwater.model.weights import gguf\n", "text may not import model"),
        ("engine/a.py", "from headwater.serve import metrics\n", "engine may not import serve"),
        ("cache/a.py", "import importlib\nimportlib.import_module('headwater.run')\n", "cache may not import run"),
        ("cache/a.py", "from headwater import LLM\n", "cache imports the whole package"),
        ("cache/a.py", "import headwater\n", "cache imports the whole package"),
        ("utils/a.py", "", "'utils' is no known part"),
    ],
)
def test_checker_reports(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    found = violations(tree(tmp_path, {name: text}))
    assert len(found) == 1
    assert complaint in found[0]
    assert found[0].startswith(f"{name}:")


def test_sched_and_run_never_reach_each_other() -> None:
    assert "run" not in reachable("sched")
    assert "sched" not in reachable("run")
    assert not reachable("bench") - FOUNDATION
