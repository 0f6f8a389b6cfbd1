from __future__ import annotations

from collections.abc import Callable

import pytest

from headwater.config import default_cache_dir
from headwater.errors import KernelError
from headwater.kernels.cpu.build import build
from headwater.kernels.cpu.library import Library
from headwater.kernels.cpu.variants import VARIANTS, obstacle


@pytest.fixture(scope="session")
def load_variant() -> Callable[[str], Library]:
    """Loads a variant, compiled once and kept where the engine keeps them; skips where it cannot be run or compiled."""
    folder = default_cache_dir() / "kernels"
    loaded: dict[str, Library] = {}

    def load(variant: str) -> Library:
        why_not = obstacle(variant)
        if why_not is not None:
            pytest.skip(f"{variant}: {why_not}")
        if variant not in loaded:
            try:
                path = build(variant, folder)
            except KernelError as error:
                if error.output:  # a compiler that does not take the sources is a failure, no compiler is not
                    raise
                pytest.skip(str(error))
            loaded[variant] = Library(variant, path)
        return loaded[variant]

    return load


@pytest.fixture(params=list(VARIANTS))
def library(request: pytest.FixtureRequest, load_variant: Callable[[str], Library]) -> Library:
    """The native kernels, each variant in turn."""
    return load_variant(request.param)
