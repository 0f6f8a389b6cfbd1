from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.cli import main
from headwater.engine.threads import ENGINE_THREADS, settle_threads
from tests.e2e.models import plain_model, write_folder

SMALL = ["--max-model-len", "256", "--num-blocks", "96", "--dtype", "float32", "--repeats", "1"]


def test_bench_step_as_a_table_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path, plain_model())
    assert main(["bench", "step", str(folder), *SMALL, "--only", "1 row at 128"]) == 0
    table = capsys.readouterr().out
    assert "decode, 1 row at 128 tokens" in table
    for part in ("schedule", "products", "attention", "sample", "detokenise", "publish"):
        assert part in table
    assert main(["bench", "step", str(folder), *SMALL, "--only", "1 row at 128", "--json"]) == 0
    [case] = json.loads(capsys.readouterr().out)
    assert case["case"] == "decode, 1 row at 128 tokens"
    assert case["ms"] > 0
    assert case["parts_ms"]["products"] > 0


def test_a_case_that_does_not_fit_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path, plain_model())
    assert main(["bench", "step", str(folder), *SMALL, "--only", "cold prompt"]) == 1
    assert "cold prompt of 2,048 tokens: needs" in capsys.readouterr().err


def test_no_case_of_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--only", "nonsense"]) == 1
    assert "no case has 'nonsense' in its name; there are: decode, 1 row at 128 tokens" in capsys.readouterr().err


def test_threads_are_settled_before_torch_is_loaded_and_the_user_has_the_last_word() -> None:
    environment = {"GOMP_SPINCOUNT": "7"}
    settle_threads(environment)
    assert environment.pop("GOMP_SPINCOUNT") == "7"
    settle_threads(environment)
    assert environment == ENGINE_THREADS
