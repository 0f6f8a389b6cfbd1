"""The options that say who may ask the server."""

from __future__ import annotations

import argparse

KEYS_VARIABLE = "HEADWATER_API_KEYS"
ADMIN_VARIABLE = "HEADWATER_ADMIN_KEY"
SECRET_VARIABLE = "HEADWATER_SALT_SECRET"
VARIABLES = (KEYS_VARIABLE, ADMIN_VARIABLE, SECRET_VARIABLE)

ABOUT = """Without keys, whoever reaches the port is the operator. With keys, each one is a tenant with cached prefixes
of its own, and only GET /health is open. A key on a command line is seen by all users of the machine (ps):
prefer the file and the variables."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("keys", ABOUT)
    group.add_argument(
        "--api-key", action="append", metavar="KEY", help="a key that requests may use; may be given several times"
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="keys, one on a line; # begins a comment line. Without these two options, the variable "
        f"{KEYS_VARIABLE} may hold keys, separated by commas or spaces",
    )
    group.add_argument(
        "--admin-key",
        metavar="KEY",
        help=f"the operator's key, for metrics, reset, the page; the variable {ADMIN_VARIABLE} sets it too",
    )
    group.add_argument(
        "--derive-salts",
        action=argparse.BooleanOptionalAction,
        help="keep the cached prefixes of each key apart (on with two or more keys, the admin key being one)",
    )
    group.add_argument(
        "--salt-secret-file",
        metavar="FILE",
        help="what derived salts are made of; default: made once and kept in the cache folder. The variable "
        f"{SECRET_VARIABLE} may hold the secret itself",
    )
