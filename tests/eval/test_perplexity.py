"""Perplexity and comparison through the engine, against Transformers run on the same windows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from headwater.config import EngineConfig
from headwater.engine.options import engine_config
from headwater.errors import ConfigError
from headwater.eval import perplexity as module
from headwater.eval.perplexity import cut, measure_perplexity, packaged_text, read_text
from headwater.text.tokenizer import Tokenizer, load_tokenizer
from tests.e2e.models import hybrid_model, plain_model, write_folder

TEXT = "the rain in spain stays mainly in the plain, " * 12
WINDOW = 40


@pytest.fixture(params=[plain_model, hybrid_model], ids=["plain", "hybrid"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    oracle = request.param()
    return write_folder(tmp_path / "model", oracle), oracle


def config_of(path: Path, **options: object) -> EngineConfig:
    wanted = {"dtype": "float32", "model_cache_dir": str(path.parent / "cache"), "kernels": "torch", **options}
    return engine_config(str(path), wanted)


def silent(what: str, fraction: float) -> None:
    """Tell nobody."""


def oracle_log_probs(oracle: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = oracle(torch.tensor([tokens])).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1)


def windows_of(path: Path, n_tokens: int) -> list[list[int]]:
    return cut(load_tokenizer(path), TEXT, n_tokens, WINDOW)


@pytest.mark.parametrize("chunk", [7, 256])
def test_perplexity_is_that_of_transformers(
    chunk: int, served: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, oracle = served
    monkeypatch.setattr(module, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr(module, "ROWS", 5)
    found = measure_perplexity(config_of(path), TEXT, n_tokens=100, window=WINDOW, report=silent)
    nll = 0.0
    for tokens in windows_of(path, 100):
        nll -= float(oracle_log_probs(oracle, tokens).gather(1, torch.tensor(tokens[1:])[:, None]).sum())
    assert found.n_tokens == 100
    assert found.perplexity == pytest.approx(math.exp(nll / 100), rel=1e-4)
    assert found.against is None


def test_comparison_is_that_of_transformers_logits(served: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """Another model's weights stand for the other engine: both sides are known to Transformers."""
    path, oracle = served
    other = type(oracle)(oracle.config).eval()
    other.load_state_dict({name: tensor * 1.02 for name, tensor in oracle.state_dict().items()})
    other_path = write_folder(tmp_path / "other", other)
    found = measure_perplexity(
        config_of(path), TEXT, n_tokens=90, window=WINDOW, report=silent, against=config_of(other_path)
    )
    agreed, kl, nll, other_nll = 0, 0.0, 0.0, 0.0
    for tokens in windows_of(path, 90):
        p, q = oracle_log_probs(oracle, tokens), oracle_log_probs(other, tokens)
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        kl += float((q.exp() * (q - p)).sum())
        targets = torch.tensor(tokens[1:])[:, None]
        nll, other_nll = nll - float(p.gather(1, targets).sum()), other_nll - float(q.gather(1, targets).sum())
    assert found.against is not None
    assert 0 < agreed < 90
    assert found.against.argmax_agreement == agreed / 90
    assert found.against.mean_kl == pytest.approx(kl / 90, rel=1e-3)
    assert found.against.perplexity == pytest.approx(math.exp(other_nll / 90), rel=1e-4)
    assert found.against.ratio == pytest.approx(math.exp((nll - other_nll) / 90), rel=1e-4)


def test_an_engine_agrees_with_itself_bit_for_bit(served: tuple[Path, PreTrainedModel]) -> None:
    config = config_of(served[0])
    found = measure_perplexity(config, TEXT, n_tokens=60, window=WINDOW, report=silent, against=config)
    assert found.against is not None
    assert (found.against.ratio, found.against.argmax_agreement, found.against.mean_kl) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("options", [{"quantization": "w8a8"}, {"quantization": "w8a16"}, {"kv_dtype": "int8"}])
def test_int8_is_measured_against_the_plain_model(
    options: dict[str, str], served: tuple[Path, PreTrainedModel]
) -> None:
    path = served[0]
    found = measure_perplexity(
        config_of(path, **options), TEXT, n_tokens=80, window=WINDOW, report=silent, against=config_of(path)
    )
    assert found.against is not None
    assert 0 < found.against.mean_kl < 0.2
    assert found.info.quantization == options.get("quantization", "none")
    assert found.info.kv_dtype == options.get("kv_dtype", "auto")
    assert (found.against.info.quantization, found.against.info.kv_dtype) == ("none", "auto")


def test_progress_ends_at_one(served: tuple[Path, PreTrainedModel]) -> None:
    told: list[tuple[str, float]] = []
    measure_perplexity(
        config_of(served[0]), TEXT, n_tokens=60, window=WINDOW, report=lambda what, part: told.append((what, part))
    )
    assert told[-1] == ("predicting", 1.0) and ("predicting", 0.0) in told


def test_a_window_beyond_the_model_is_refused_by_name(served: tuple[Path, PreTrainedModel]) -> None:
    with pytest.raises(ConfigError, match="4096"):
        measure_perplexity(config_of(served[0]), TEXT, n_tokens=60, window=5000, report=silent)


# ---- windows --------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(write_folder(tmp_path / "toy", plain_model()))


@pytest.mark.parametrize("n_tokens", [1, 2, 38, 39, 40, 100, 117])
@pytest.mark.parametrize("begin", [(), (1,)])
def test_windows_predict_exactly_as_many_tokens(n_tokens: int, begin: tuple[int, ...], tokenizer: Tokenizer) -> None:
    tokenizer._prefix = list(begin)
    windows = cut(tokenizer, TEXT, n_tokens, WINDOW)
    assert sum(len(tokens) - 1 for tokens in windows) == n_tokens
    assert max(len(tokens) for tokens in windows) <= WINDOW
    content = [token for tokens in windows for token in tokens[len(begin) :]]
    assert content == tokenizer.encode(TEXT, add_special_tokens=False, parse_special=False)[: len(content)]
    assert all(tokens[: len(begin)] == list(begin) for tokens in windows)


def test_a_short_text_is_predicted_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("in the plain", add_special_tokens=False, parse_special=False)
    (window,) = cut(tokenizer, "in the plain", 10_000, WINDOW)
    assert window == [*tokenizer.prefix_ids, *ids]


@pytest.mark.parametrize("text", ["", "a"])
def test_a_text_without_anything_to_predict_is_refused(text: str, tokenizer: Tokenizer) -> None:
    tokenizer._prefix = []
    with pytest.raises(ConfigError, match="no token that could be predicted"):
        cut(tokenizer, text, 100, WINDOW)


# ---- texts ----------------------------------------------------------------------------------------------


def test_the_packaged_text_is_long_enough_and_clean() -> None:
    text = packaged_text()
    assert len(text.split()) > 10_000  # a tokenizer makes at least a token of a word
    assert text.startswith("CHAPTER I\n") and text.isascii()
    assert "Gutenberg" not in text and "\r" not in text and "  " not in text


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "x"
    with pytest.raises(ConfigError, match=r"--text .*x: not a readable UTF-8 text"):
        read_text(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_text(file)
