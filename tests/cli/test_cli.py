"""The command line: help, errors that help, options that arrive."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from headwater.cli import demo, main
from headwater.cli.arguments import amount, parse
from headwater.cli.serve import config_of


def fails(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headwater", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"headwater {version('headwater')}\n"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("headwater.cli.arguments", ["torch", "fastapi", "numpy"]), ("headwater.cli.serve", ["torch"])],
)
def test_commands_load_only_what_they_need(module: str, heavy: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout.strip()) == ("", "[]")


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["serve", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(argv)
        assert end.value.code == 0
        assert "examples:\n  headwater serve" in capsys.readouterr().out


def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for default in ("(smollm2-135m)", "(127.0.0.1)", "(8000)", "(512)", "(16)", "(sha256)", "(on)", "HEADWATER_CACHE"):
        assert default in shown, default


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "headwater pull gemma3-270m" in capsys.readouterr().out


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    by_option = capsys.readouterr().out
    main(["version"])
    assert capsys.readouterr().out == by_option


def test_a_tilde_in_the_cache_folder_is_the_home_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["models", "--model-cache-dir=~/kept"]) == 0
    assert str(tmp_path / "kept" / "models") in capsys.readouterr().out


def test_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["models", "--model-cache-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "smollm2-135m" in shown
    assert "gemma3-270m" in shown
    assert "Apache-2.0" in shown


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("serve", "--max-model-length", "5"), "unknown option --max-model-length: did you mean --max-model-len?"),
        (("serve", "--no-enable-prefix-cache"), "did you mean --no-enable-prefix-caching?"),
        (("serve", "--zzzzzz"), "unknown option --zzzzzz\n"),
        (("serve", "a", "b"), "unknown argument b"),
        (("serve", "--max-num-seqs", "0"), "--max-num-seqs: must be at least 1, got 0"),
        (("serve", "--max-num-seqs", "many"), "--max-num-seqs: 'many' is no whole number"),
        (("serve", "--port", "65536"), "--port: must be at most 65535"),
        (("serve", "--threads", "9" * 30), "--threads: must be at most 2147483647"),
        (("serve", "--num-blocks", "1" + "0" * 30), "--num-blocks: must be at most 2147483647"),
        (("serve", "--seed", str(2**63)), "--seed: must be at most 9223372036854775807"),
        (("serve", "--kv-cache-memory-bytes", "9" * 400 + "GiB"), "must be at most 9223372036854775807 bytes"),
        (("serve", "--kv-cache-memory-bytes", "0.5"), "at least one byte is needed"),
        (("serve", "--dtype", "float17"), "--dtype: invalid choice: 'float17'"),
        (("serve", "--kv-cache-memory-bytes", "2 bananas"), "is no amount of memory"),
        (("sreve",), "invalid choice: 'sreve'"),
        (("pull",), "required: name"),
        (("version", "now"), "unknown argument now"),
    ],
)
def test_a_wrong_command_line_is_a_short_error(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    error = refusal(capsys, *argv)
    assert message in error
    assert len(error.splitlines()) == 2
    assert error.splitlines()[1].startswith("See headwater")


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("1", 1),
        ("512MiB", 2**29),
        ("2GiB", 2**31),
        ("2gib", 2**31),
        ("1.5 GB", 1_500_000_000),
        ("4k", 4000),
        ("7b", 7),
        ("8589934591GiB", 2**63 - 2**30),
    ],
)
def test_amounts_of_memory(text: str, n_bytes: int) -> None:
    assert amount(text) == n_bytes


def test_options_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWATER_CACHE", raising=False)
    line = (
        "serve --model m.gguf --max-model-len 99 --max-num-seqs 3 --max-num-batched-tokens 77 "
        "--max-num-mixed-tokens 33 --block-size 8 --no-enable-prefix-caching --prefix-caching-hash-algo xxh3_128 "
        "--dtype float32 --served-model-name s --kv-cache-memory-bytes 1GiB --num-blocks 5 --threads 2 --seed 9 "
        "--max-waiting 4 --model-cache-dir d"
    )
    config = config_of(parse(line.split()))
    assert (config.model.model, config.model.served_model_name, config.model.dtype) == ("m.gguf", "s", "float32")
    assert (config.model.threads, config.model.seed, config.model.cache_dir) == (2, 9, "d")
    assert (config.cache.block_size, config.cache.enable_prefix_caching, config.cache.hash_algo) == (
        8,
        False,
        "xxh3_128",
    )
    assert (config.cache.kv_cache_memory_bytes, config.cache.n_blocks) == (2**30, 5)
    assert (config.scheduler.max_model_len, config.scheduler.max_num_seqs) == (99, 3)
    assert (config.scheduler.max_num_batched_tokens, config.scheduler.max_num_mixed_tokens) == (77, 33)
    assert config.scheduler.max_waiting == 4


def test_the_model_may_stand_alone_but_not_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_CACHE", "/somewhere")
    config = config_of(parse(["serve", "m.gguf"]))
    assert (config.model.model, config.model.cache_dir) == ("m.gguf", "/somewhere")
    assert config_of(parse(["serve"])).model.model == "smollm2-135m"
    assert "two models" in fails("serve", "a.gguf", "--model", "b.gguf").stderr


def test_accounts_are_not_told_and_left_out_at_once() -> None:
    error = fails("serve", "no-such-model.gguf", "--explain-usage", "--no-explain").stderr
    assert "--explain-usage" in error and "--no-explain" in error


def test_the_demo_hands_its_options_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWATER_CACHE", raising=False)
    arguments = parse(["demo", "m.gguf", "--no-enable-prefix-caching", "--kv-cache-memory-bytes", "1MiB"])
    command = demo.serve_command(arguments)
    again = config_of(parse(command[command.index("serve") :]))
    assert again == config_of(arguments)


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = fails("serve", str(tmp_path / "no.gguf"), "--port", "0")
    assert done.stderr == f"headwater: error: {tmp_path}/no.gguf: no such file or folder\n"
    assert "did you mean 'smollm2-135m'" in fails("serve", "smollm-135m", "--port", "0").stderr


def test_a_file_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"this is no model at all, but it has some length")
    done = fails("serve", str(tmp_path / "bad.gguf"), "--port", "0")
    assert done.stderr.startswith("headwater: error: ")
    assert "bad.gguf" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_in_use_is_told_before_the_model_is_looked_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = fails("serve", "no.gguf", "--port", str(taken.getsockname()[1]))
    assert "is in use" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("host", ["256.256.256.256", "no-such-host.invalid", "a..b", "x" * 64])
def test_a_host_that_is_none_is_one_line(host: str) -> None:
    done = fails("serve", "no.gguf", "--host", host)
    assert done.stderr.startswith(f"headwater: error: cannot listen on {host}:8000")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("argv", [("b\udcff.gguf",), ("m.gguf", "--served-model-name", "\udcff")])
def test_a_name_that_is_no_utf_8_is_one_line(argv: tuple[str, ...]) -> None:
    done = fails("serve", *argv, "--port", "0")
    assert "must be valid UTF-8" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_empty_model_is_not_the_default_one() -> None:
    assert config_of(parse(["serve", ""])).model.model == ""
    assert config_of(parse(["serve", "--model", ""])).model.model == ""


def test_an_unknown_model_to_pull_is_one_line() -> None:
    done = fails("pull", "gpt-17")
    assert done.stderr.startswith("headwater: error: 'gpt-17' is not in the catalogue")


def test_ctrl_c_is_status_130_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.cli.models.print", lambda *_: os.kill(os.getpid(), signal.SIGINT), raising=False)
    assert main(["version"]) == 130
