"""``headwater eval perplexity``: what is compared with what, and what is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headwater.cli import main
from headwater.cli.arguments import parse
from headwater.cli.eval import reference_of
from headwater.cli.serve import config_of
from headwater.config import EngineConfig
from tests.e2e.models import plain_model, write_folder


def config(*argv: str) -> EngineConfig:
    return config_of(parse(["eval", "perplexity", *argv]))


def against(*argv: str) -> EngineConfig | None:
    arguments = parse(["eval", "perplexity", *argv])
    return reference_of(config_of(arguments), arguments.against)


def test_nothing_is_compared_unless_something_is_in_int8_or_it_is_asked_for() -> None:
    assert against() is None
    for argv in (["--quantization", "w8a8"], ["--kv-dtype", "int8"], ["--against", "bf16"]):
        assert against(*argv) is not None


def test_the_reference_is_the_same_but_plain() -> None:
    other = against("--quantization", "w8a8", "--kv-dtype", "int8", "--dtype", "float32", "--block-size", "32")
    assert other == config("--dtype", "float32", "--block-size", "32")


@pytest.mark.parametrize(("name", "dtype"), [("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("f32", "float32")])
def test_the_reference_may_have_another_dtype(name: str, dtype: str) -> None:
    assert against("--against", name, "--quantization", "w8a16") == config("--dtype", dtype)


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "model", plain_model())
    (tmp_path / "text").write_text("in the beginning " * 20)
    argv = ["eval", "perplexity", str(folder), "--text", str(tmp_path / "text"), "--tokens", "50", "--window", "30"]
    argv += ["--dtype", "float32", "--quantization", "w8a8", "--kernels", "torch", "--model-cache-dir", str(tmp_path)]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert re.fullmatch(
        rf"{re.escape(str(folder))}: float32, weights w8a8\n"
        rf"50 tokens of {re.escape(str(tmp_path / 'text'))}, in windows of 30\n"
        r"  perplexity        [\d.]+\n"
        r"against float32\n"
        r"  perplexity        [\d.]+\n"
        r"  ratio             [01]\.\d{4}\n"
        r"  argmax agreement  [01]\.\d{4}\n"
        r"  mean KL           0\.\d{5} nats\n",
        printed,
    )


def test_a_missing_text_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "perplexity", "--text", str(tmp_path / "nothing")]) == 1
    assert "headwater: error: --text" in capsys.readouterr().err
