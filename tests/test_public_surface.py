"""What `import headwater` offers: nothing more, nothing less, and nothing heavy before it is used."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from inspect import signature

import pytest

import headwater

PUBLIC = {
    "LLM",
    "SamplingParams",
    "CompletionOutput",
    "RequestOutput",
    "HeadwaterError",
    "BadRequest",
    "CacheError",
    "ConfigError",
    "EngineDead",
    "EngineError",
    "ModelError",
    "NeverFits",
    "NoChatTemplate",
    "Overloaded",
    "__version__",
}

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)


def test_public_names() -> None:
    assert set(headwater.__all__) == PUBLIC
    assert set(dir(headwater)) == PUBLIC
    assert len(headwater.__all__) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_public_name_is_there_and_says_what_it_is(name: str) -> None:
    thing = getattr(headwater, name)
    assert thing.__name__ == name
    assert thing.__doc__ and not thing.__doc__.startswith(f"{name}(")  # not the signature dataclasses write


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        headwater.Engine  # noqa: B018


def test_every_public_error_is_a_headwater_error() -> None:
    errors = [getattr(headwater, name) for name in PUBLIC - {"__version__"}]
    raised = {error for error in errors if issubclass(error, BaseException)}
    assert len(raised) == 10
    assert all(issubclass(error, headwater.HeadwaterError) for error in raised)


def test_version_is_the_installed_one() -> None:
    assert headwater.__version__ == version("headwater")


def test_sampling_params_have_vllm_names_and_order() -> None:
    assert tuple(field.name for field in fields(headwater.SamplingParams)) == SAMPLING_FIELDS


def test_generate_and_chat_have_vllm_names() -> None:
    assert list(signature(headwater.LLM.generate).parameters)[:3] == ["self", "prompts", "sampling_params"]
    assert list(signature(headwater.LLM.chat).parameters)[:3] == ["self", "messages", "sampling_params"]
    assert {"prompt", "prompt_token_ids", "outputs", "num_cached_tokens"} <= {
        field.name for field in fields(headwater.RequestOutput)
    }


def test_importing_loads_nothing_heavy() -> None:
    code = (
        "import sys, headwater\nheadwater.SamplingParams, headwater.BadRequest\n"
        "print([name for name in ('torch', 'numpy', 'fastapi', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout.strip()) == ("", "[]")
