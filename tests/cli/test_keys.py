"""Keys from options, files and variables; the salt secret that is kept."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headwater.cli.arguments import parse
from headwater.cli.key_arguments import VARIABLES
from headwater.cli.keys import kept_secret, take_server_config, warnings
from headwater.config import ServerConfig
from headwater.errors import ConfigError
from headwater.serve.access import Access


def config(folder: Path, *options: str, **variables: str) -> ServerConfig:
    return take_server_config(parse(["serve", *options]), variables, folder / "cache")


def refused(folder: Path, *options: str, **variables: str) -> str:
    with pytest.raises(ConfigError) as error:
        config(folder, *options, **variables)
    return str(error.value)


# ---- where keys come from ---------------------------------------------------------------------------


def test_no_keys_no_secret(tmp_path: Path) -> None:
    assert config(tmp_path) == ServerConfig()
    assert not (tmp_path / "cache").exists()


def test_keys_of_options_and_file_add_up(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbf# team a\r\none\r\n\r\n# team b\ntwo#2\n\nthree")
    found = config(tmp_path, "--api-key", "a", "--api-key-file", str(file), "--api-key", "b", "--admin-key", "root")
    assert found.api_keys == ("a", "b", "one", "two#2", "three")
    assert found.admin_key == "root"


def test_variables_count_where_no_option_is_given(tmp_path: Path) -> None:
    variables = {"HEADWATER_API_KEYS": "one,two\nthree  four, ", "HEADWATER_ADMIN_KEY": "root"}
    found = config(tmp_path, **variables)
    assert (found.api_keys, found.admin_key) == (("one", "two", "three", "four"), "root")
    found = config(tmp_path, "--api-key", "five", "--admin-key", "other", **variables)
    assert (found.api_keys, found.admin_key) == (("five",), "other")


def test_variables_leave_the_environment(tmp_path: Path) -> None:
    environment = {name: "a-value-of-sixteen-bytes-" + name[-3:] for name in VARIABLES} | {"PATH": "/bin"}
    take_server_config(parse(["serve"]), environment, tmp_path)
    assert environment == {"PATH": "/bin"}


def test_only_the_command_line_reads_the_variables() -> None:
    source = Path(__file__).parent.parent.parent / "src" / "headwater"
    readers = {
        path.relative_to(source).parts[0]
        for path in source.rglob("*.py")
        if any(name in path.read_text() for name in VARIABLES)
    }
    assert readers == {"cli"}


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "\ufeff"])
def test_a_file_without_a_key_does_not_open_the_server(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    assert "holds no key" in refused(tmp_path, "--api-key-file", str(file))


@pytest.mark.parametrize("text", ["", " ", ",", " ,\n"])
def test_a_variable_without_a_key_does_not_open_the_server(tmp_path: Path, text: str) -> None:
    assert "HEADWATER_API_KEYS holds no key" in refused(tmp_path, HEADWATER_API_KEYS=text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("good\nse cret\n", "line 2, has white space"),
        ("good\nsecret \n", "line 2, has white space"),
        ("good\n secret\n", "line 2, has white space"),
        ("good\nsec\rret\n", "line 2, has a line break"),
        ("good\nsec\x1cret\n", "line 2, has a line break"),
        ("good\nsec\x85ret\n", "line 2, has a line break"),
        ("good\nsecr\u00e9t\n", "line 2, has a character that is not ASCII"),
        ("good\nsecret,other\n", "line 2, has a comma"),
        ("good\n" + "secret" * 100 + "\n", "line 2, has 600 characters"),
        ("secret\n\nsecret\n", "line 1, and .*keys, line 3, are equal"),
        ("   \n", "line 1, has white space"),
    ],
)
def test_a_bad_line_is_named_and_not_shown(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, newline="")
    message = refused(tmp_path, "--api-key-file", str(file))
    assert re.search(why, message)
    assert "ecr" not in message


def test_other_bad_keys_are_named_and_not_shown(tmp_path: Path) -> None:
    assert "--api-key is empty" in refused(tmp_path, "--api-key", "")
    assert "--api-key number 2 has a comma" in refused(tmp_path, "--api-key", "a", "--api-key", "secret,b")
    assert "--admin-key is empty" in refused(tmp_path, "--api-key", "a", "--admin-key", "")
    assert "HEADWATER_ADMIN_KEY is empty" in refused(tmp_path, HEADWATER_ADMIN_KEY="")
    assert "--api-key and --admin-key are equal" in refused(tmp_path, "--api-key", "secret", "--admin-key", "secret")
    message = refused(tmp_path, HEADWATER_API_KEYS="a secret b secret")
    assert message.startswith("key 2 of HEADWATER_API_KEYS and key 4 of HEADWATER_API_KEYS are equal")
    assert "secret" not in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot read" in refused(tmp_path, "--api-key-file", str(tmp_path / "none"))
    assert "cannot read" in refused(tmp_path, "--api-key-file", str(tmp_path))
    (tmp_path / "keys").write_bytes(b"secret\xff\n")
    message = refused(tmp_path, "--api-key-file", str(tmp_path / "keys"))
    assert "not UTF-8" in message
    assert "secret" not in message
    (tmp_path / "keys").write_bytes(b"#" * (2**20 + 1))
    assert "larger than" in refused(tmp_path, "--api-key-file", str(tmp_path / "keys"))


# ---- the salt secret --------------------------------------------------------------------------------


def test_the_secret_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    first = config(tmp_path, "--api-key", "a", "--api-key", "b")
    path = tmp_path / "cache" / "salt-secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["salt-secret"]
    assert first.salt_secret is not None
    assert len(first.salt_secret) == 64
    assert config(tmp_path, "--api-key", "a", "--api-key", "b").salt_secret == first.salt_secret
    assert config(tmp_path / "other", "--api-key", "a", "--api-key", "b").salt_secret != first.salt_secret


def test_servers_that_start_together_make_one_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        for i in range(20):
            made = set(pool.map(kept_secret, [tmp_path / str(i) / "salt-secret"] * 16))
            assert len(made) == 1


def test_a_secret_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("  a secret of my own choice \r\n")
    keys = ("--api-key", "a", "--api-key", "b")
    assert config(tmp_path, *keys, "--salt-secret-file", str(file)).salt_secret == b"a secret of my own choice"
    variable = {"HEADWATER_SALT_SECRET": "another secret of my own"}
    assert config(tmp_path, *keys, **variable).salt_secret == b"another secret of my own"
    assert (
        config(tmp_path, *keys, "--salt-secret-file", str(file), **variable).salt_secret != b"another secret of my own"
    )
    assert not (tmp_path / "cache").exists()


def test_a_secret_that_does_not_do_is_refused_and_not_shown(tmp_path: Path) -> None:
    keys = ("--api-key", "a", "--api-key", "b")
    message = refused(tmp_path, *keys, HEADWATER_SALT_SECRET="sixteen-less-1")
    assert "HEADWATER_SALT_SECRET holds a salt secret of 14 bytes" in message
    assert "sixteen" not in message
    assert "cannot read" in refused(tmp_path, *keys, "--salt-secret-file", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "salt-secret").write_text("")
    os.chmod(tmp_path / "cache" / "salt-secret", 0o600)
    assert "of 0 bytes" in refused(tmp_path, *keys)


def test_a_kept_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    kept_secret(tmp_path / "salt-secret")
    os.chmod(tmp_path / "salt-secret", 0o640)
    with pytest.raises(ConfigError, match=r"others may read the salt secret: chmod 600 .*salt-secret"):
        kept_secret(tmp_path / "salt-secret")


def test_where_it_cannot_be_kept_the_way_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert "--salt-secret-file" in refused(tmp_path, "--api-key", "a", "--api-key", "b")
    assert config(tmp_path, "--api-key", "a", "--api-key", "b", "--no-derive-salts").salt_secret is None


# ---- what is said at the start ----------------------------------------------------------------------


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.7", "fe80::1%eth0"])
def test_an_open_server_that_others_reach_is_warned_about(address: str) -> None:
    arguments = parse(["serve"])
    assert len(list(warnings(arguments, Access(ServerConfig()), address))) == 1
    assert list(warnings(arguments, Access(ServerConfig(api_keys=("a",))), address)) == []


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.5", "::1"])
def test_loopback_is_not_warned_about(address: str) -> None:
    assert list(warnings(parse(["serve"]), Access(ServerConfig()), address)) == []


def test_a_key_file_that_others_may_read_is_warned_about(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a")
    arguments = parse(["serve", "--api-key-file", str(tmp_path / "keys")])
    os.chmod(tmp_path / "keys", 0o644)
    assert len(list(warnings(arguments, Access(ServerConfig(api_keys=("a",))), "127.0.0.1"))) == 1
    os.chmod(tmp_path / "keys", 0o600)
    assert list(warnings(arguments, Access(ServerConfig(api_keys=("a",))), "127.0.0.1")) == []


def test_a_bad_key_ends_the_command_before_anything_is_loaded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headwater", "serve", "no-such-model", "--api-key", "a secret one"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "error: --api-key has white space as character 2" in done.stderr
    assert "secret" not in done.stderr + done.stdout


def test_the_help_says_that_keys_on_a_command_line_are_seen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "seen by all users of the machine (ps)" in shown
    for name in VARIABLES:
        assert name in shown
