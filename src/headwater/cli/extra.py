"""Packages that are not always installed."""

from __future__ import annotations

from headwater.errors import ConfigError


def missing_extra(error: ModuleNotFoundError) -> ConfigError:
    """For a package that the extra `bench` brings and that is not there; raises ``error`` if it is about another."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "headwater"):
        raise error
    return ConfigError(f"headwater bench needs the package {package}: pip install 'headwater[bench]'")
