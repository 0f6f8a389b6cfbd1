"""Keys of the server: from options, files and the environment to its configuration."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import stat
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

from headwater.cli.key_arguments import ADMIN_VARIABLE, KEYS_VARIABLE, SECRET_VARIABLE, VARIABLES
from headwater.config import ServerConfig, default_cache_dir
from headwater.errors import ConfigError
from headwater.serve.access import Access, GivenKey, check_keys

SECRET_FILE = "salt-secret"
MIN_SECRET_BYTES = 16
MAX_FILE_BYTES = 2**20


def take_server_config(
    arguments: argparse.Namespace, environment: MutableMapping[str, str], cache_dir: Path | None
) -> ServerConfig:
    """Where to listen, and the keys. They leave ``environment``: no process that is started later inherits them.

    Raises ConfigError, whose message shows no key.
    """
    variables = {name: environment.pop(name) for name in VARIABLES if name in environment}
    api_keys = list(_api_keys(arguments, variables))
    if not api_keys and (arguments.api_key_file is not None or KEYS_VARIABLE in variables):
        source = arguments.api_key_file or KEYS_VARIABLE
        raise ConfigError(f"{source} holds no key: put one there, or leave it away to serve without keys")
    admin_key = _admin_key(arguments, variables)
    check_keys(api_keys + ([] if admin_key is None else [admin_key]))
    config = ServerConfig(
        host=arguments.host,
        port=arguments.port,
        api_keys=tuple(given.key for given in api_keys),
        admin_key=None if admin_key is None else admin_key.key,
        derive_salts=arguments.derive_salts,
    )
    secret = _given_secret(arguments, variables)
    if secret is None and (api_keys or admin_key) and arguments.derive_salts is not False:
        secret = kept_secret((cache_dir or default_cache_dir()) / SECRET_FILE)
    return replace(config, salt_secret=secret)


def _api_keys(arguments: argparse.Namespace, variables: Mapping[str, str]) -> Iterator[GivenKey]:
    """All keys of the options; without any of those, the variable's."""
    given = arguments.api_key or ()
    for i, key in enumerate(given, 1):
        yield GivenKey(f"--api-key number {i}" if len(given) > 1 else "--api-key", key)
    if arguments.api_key_file is not None:
        lines = _text(arguments.api_key_file, "--api-key-file").split("\n")
        for number, line in enumerate(lines, 1):
            key = line.removesuffix("\r")
            if key and not key.startswith("#"):
                yield GivenKey(f"{arguments.api_key_file}, line {number},", key)
    elif not given:
        for i, key in enumerate(variables.get(KEYS_VARIABLE, "").replace(",", " ").split(), 1):
            yield GivenKey(f"key {i} of {KEYS_VARIABLE}", key)


def _admin_key(arguments: argparse.Namespace, variables: Mapping[str, str]) -> GivenKey | None:
    if arguments.admin_key is not None:
        return GivenKey("--admin-key", arguments.admin_key)
    return GivenKey(ADMIN_VARIABLE, variables[ADMIN_VARIABLE]) if ADMIN_VARIABLE in variables else None


def _given_secret(arguments: argparse.Namespace, variables: Mapping[str, str]) -> bytes | None:
    if arguments.salt_secret_file is not None:
        return _secret(_text(arguments.salt_secret_file, "--salt-secret-file"), arguments.salt_secret_file)
    return _secret(variables[SECRET_VARIABLE], SECRET_VARIABLE) if SECRET_VARIABLE in variables else None


def _secret(text: str, where: str) -> bytes:
    """The secret that a file or variable holds; white space around it does not count."""
    secret = text.strip().encode("utf-8", "surrogateescape")
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"{where} holds a salt secret of {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed")
    return secret


def kept_secret(path: Path) -> bytes:
    """The secret in the file ``path``, which is made, for its owner alone, if it is not there.

    Raises ConfigError when it cannot be read or made.
    """
    hint = "name another file with --salt-secret-file"
    try:
        if not path.exists():
            _make_secret(path)
        text = path.read_text()
        if _others_may_read(path):
            raise ConfigError(f"others may read the salt secret: chmod 600 {shlex.quote(str(path))}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot keep the salt secret in {path}: {_reason(error)}; {hint}") from None
    return _secret(text, str(path))


def _make_secret(path: Path) -> None:
    """Whole or not at all, and the same one for servers that start together: the first to link its file wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # mode 0600
    try:
        with open(made, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


def _others_may_read(path: Path) -> bool:
    return os.name == "posix" and bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def warnings(arguments: argparse.Namespace, access: Access, address: str) -> Iterator[str]:
    """What an operator should know before the server starts. ``address`` is the one that it listens on."""
    if not access.guarded and not ip_address(address.partition("%")[0]).is_loopback:
        yield (
            f"listening on {address} without API keys: whoever reaches it may do everything. "
            "Give --api-key-file and --admin-key"
        )
    if arguments.api_key_file is not None and _others_may_read(Path(arguments.api_key_file).expanduser()):
        yield f"other users may read the API keys in {arguments.api_key_file}: chmod 600"


def _text(name: str, option: str) -> str:
    """What a given file holds. Raises ConfigError."""
    try:
        with open(Path(name).expanduser(), "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{option} {name}: larger than {MAX_FILE_BYTES} bytes")
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: cannot read {name}: {_reason(error)}") from None


def _reason(error: OSError | UnicodeDecodeError) -> str:
    """Without the bytes that were read."""
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or type(error).__name__
