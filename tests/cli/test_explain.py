from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwater.cli import main
from tests.explaining.planted import PLANTED, TEMPLATE, body, mixed, prose, same_prompt, write
from tests.text.toy import write_toy_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_folder(tmp_path_factory.mktemp("toy"), chat_template=TEMPLATE)


def explain(folder: Path, *argv: object) -> int:
    return main(["explain", "--tokenizer", str(folder), *map(str, argv)])


def broken(path: Path) -> Path:
    rng = random.Random(1)
    return write(path, PLANTED["time"](rng) + PLANTED["tool_order"](rng))


def test_findings_are_printed_most_costly_first(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(folder, broken(tmp_path / "log")) == 0
    out = capsys.readouterr().out
    assert out.index("1. the same tools in changing order") < out.index("2. a time or date that changes")
    assert f"at {tmp_path / 'log'}:" in out
    assert "in message 0 (system), character" in out
    assert "\x1b" not in out
    assert "tokens lost:" in out and "Sort the list of tools by name" in out


def test_json_has_the_same(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(folder, broken(tmp_path / "log"), "--json", "--top", 1) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["requests"] == 60
    (finding,) = told["findings"]
    assert finding["kind"] == "tool_order"
    assert finding["lost_tokens"] == pytest.approx(finding["lost_tokens_per_request"] * finding["requests"], abs=5)
    assert set(finding["example"]) >= {"where", "other", "message", "role", "character", "before", "ours", "theirs"}


def test_a_clean_log_says_so(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(folder, write(tmp_path / "log", same_prompt(random.Random(1))), "--fail-over", 0) == 0
    assert "Nothing breaks their common beginnings." in capsys.readouterr().out


def test_it_is_a_check_for_ci(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = broken(tmp_path / "log")
    assert explain(folder, log, "--json") == 0
    lost = json.loads(capsys.readouterr().out)["lost_tokens"]
    assert explain(folder, log, "--fail-over", lost) == 0
    assert explain(folder, log, "--fail-over", lost - 1) == 3


def test_bad_lines_are_named_and_skipped(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    lines: list[Any] = [{"x": 1}, [1], {"messages": [{"role": "user", "content": 3}]}]
    text = "\n".join(map(json.dumps, lines)).encode() + b'\n{"messages"\n\n\xff\n'
    log.write_bytes(text + json.dumps({"custom_id": "1", "body": body("a", "b")}).encode())
    assert explain(folder, log) == 0
    out, err = capsys.readouterr()
    assert out.startswith("1 requests, 5 lines skipped")
    for line in (1, 2, 3, 4, 6):
        assert f"skipped {log}:{line}: " in err


def test_without_any_request_the_status_is_1(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_text("nothing\n")
    assert explain(folder, log) == 1
    assert explain(folder, tmp_path / "gone") == 1
    assert f"{tmp_path / 'gone'}: cannot be read" in capsys.readouterr().err


def test_a_tokenizer_without_a_template_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = write_toy_folder(tmp_path / "bare")
    assert explain(bare, write(tmp_path / "log", [body("a", "b")])) == 1
    assert "no chat template" in capsys.readouterr().err


def test_what_a_log_holds_cannot_drive_the_terminal(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = prose(random.Random(1), 6)
    log = [body(f"\x1b[31m[bold]Now 10:0{i}. \x1b]0;x\x07{rules}", "Why?") for i in range(3)]
    assert explain(folder, write(tmp_path / "log", log)) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "[bold]Now 10:0" in out


def test_the_real_model_over_a_thousand_requests(tmp_path: Path, model_file: Callable[[str], Path]) -> None:
    rng = random.Random(9)
    kinds = ("time", "id", "counter", "json", "system_changes")
    log = write(tmp_path / "log", mixed(rng, [PLANTED[kind](rng) for kind in kinds], 1000))
    command = [
        sys.executable,
        "-m",
        "headwater",
        "explain",
        str(log),
        "--tokenizer",
        str(model_file("smollm2-135m")),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["requests"] == 1000
    assert sorted(finding["kind"] for finding in told["findings"]) == sorted(kinds)


def test_a_byte_order_mark_is_no_bad_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"\xef\xbb\xbf" + b'{"messages": [{"role": "user", "content": "Why?"}]}\r\n' * 2)
    assert explain(folder, log) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith("2 requests, ")
