from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headwater.cli import main
from headwater.cli.bench_prefix import command_of


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prefixes", "12,x"], "'x' is no whole number"),
        (["--prefixes", "5,5"], "'5,5' has a number twice"),
        (["--prefixes", "0"], "must be at least 1"),
        (["--caching", "maybe"], "'maybe' is none of on, off"),
        (["--interference", "some"], "'some' is none of none, evicting"),
        (["--prefx", "3"], "unknown option --prefx: did you mean --prefixes?"),
        (["--repeats", "0"], "must be at least 1, got 0"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "prefix", *options])
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--resume", "/nowhere"], "/nowhere holds no results: there is no run.json in it"),
        (["--resume", "x", "--quick"], "give nothing beside it"),
        (["--resume", "x", "--out", "y"], "give nothing beside it"),
        (["--url", "nowhere:0"], "'nowhere:0' is no address"),
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9/v1"),
        (["--start-command", "serve"], "must say {port}"),
        (["--evicting-blocks", "3"], "give at least 146, or shorter --prefixes"),
        (["--quick", "--evicting-blocks", "3"], "give at least 132"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "prefix", *options]) == 1
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["httpx", "matplotlib"])
def test_a_missing_extra_is_named_before_anything_is_measured(tmp_path: Path, package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; from headwater.cli import main; "
        "sys.exit(main(['bench', 'prefix', '--url', 'http://127.0.0.1:9']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1
    assert f"headwater bench needs the package {package}: pip install 'headwater[bench]'" in done.stderr


def test_keys_are_not_written_down() -> None:
    typed = ["/x/headwater", "bench", "prefix", "--api-key", "secret", "--label", "a b"]
    assert command_of(typed) == ["headwater", "bench", "prefix", "--api-key", "KEY", "--label", "'a b'"]
    assert command_of(["headwater", "--api-key=secret"]) == ["headwater", "--api-key=KEY"]
