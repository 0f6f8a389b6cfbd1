"""The engine with native kernels, and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater import LLM, ConfigError, SamplingParams
from headwater.config import default_cache_dir
from headwater.errors import KernelError
from headwater.kernels.cpu.build import build
from tests.e2e.models import plain_model, write_folder

SMALL = {"max_model_len": 64, "num_blocks": 16, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path, plain_model())


@pytest.fixture(scope="module")
def cache_dir() -> Path:
    """The user's cache folder, in which the portable kernels are compiled now."""
    kernels = default_cache_dir() / "kernels"
    try:
        build("portable", kernels)
    except KernelError as error:
        if error.output:
            raise
        pytest.skip(str(error))
    return kernels.parent


def test_native_kernels_serve_and_say_so(folder: Path, cache_dir: Path) -> None:
    answers = []
    for kernels in ("portable", "torch"):
        with LLM(folder, kernels=kernels, model_cache_dir=str(cache_dir), **SMALL) as llm:
            answers.append([output.outputs[0].token_ids for output in llm.generate(["ab", "ba" * 9], GREEDY)])
            native = [note for note in llm.info.notes if note.startswith("native kernels: ")]
            assert native == (["native kernels: portable"] if kernels == "portable" else [])
            assert llm.info.row_invariant
    assert answers[0] == answers[1]


def test_without_a_compiler_the_engine_serves_all_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with LLM(folder, kernels="auto", model_cache_dir=str(tmp_path), **SMALL) as llm:
        assert any("no native kernels: no C++ compiler" in note for note in llm.info.notes)
        assert llm.generate("ab", GREEDY)[0].outputs[0].token_ids
    with pytest.raises(ConfigError, match="kernels=portable: no C\\+\\+ compiler"):
        LLM(folder, kernels="portable", model_cache_dir=str(tmp_path), **SMALL)


def test_a_compiler_that_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    with LLM(folder, kernels="auto", compiler="no-such-c++", model_cache_dir=str(tmp_path), **SMALL) as llm:
        assert any("'no-such-c++' is not found" in note for note in llm.info.notes)


@pytest.mark.parametrize("kernels", ["portable", "torch"])
def test_fast_numerics_promise_nothing(folder: Path, cache_dir: Path, kernels: str) -> None:
    with LLM(folder, kernels=kernels, numerics="fast", model_cache_dir=str(cache_dir), **SMALL) as llm:
        assert not llm.info.row_invariant
        assert any("equal bits are not promised" in note for note in llm.info.notes)
        assert not any("checked on this CPU" in note for note in llm.info.notes)
        assert llm.generate("ab", GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize("option", [{"kernels": "sse9"}, {"numerics": "loose"}])
def test_what_there_is_not_is_refused(folder: Path, option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        LLM(folder, **option, **SMALL)
