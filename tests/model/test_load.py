"""Loading: the compute dtype, the order of rotated rows, what progress tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.errors import ConfigError, ModelError
from headwater.kernels.torch_ref import TorchOps
from headwater.model import load as load_module
from headwater.model.layers import inverse_frequencies, rope_table
from headwater.model.load import load_model, resolve_dtype
from headwater.model.spec import RopeSpec
from headwater.model.tensors import halves_from_pairs
from tests.model.tiny import CONFIGS, tiny


@pytest.mark.parametrize(
    ("name", "has_bf16", "dtype"),
    [
        ("auto", True, torch.bfloat16),
        ("auto", False, torch.float32),
        ("float32", True, torch.float32),
        ("bfloat16", False, torch.bfloat16),
    ],
)
def test_dtype(name: str, has_bf16: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "cpu_has_bf16", lambda: has_bf16)
    assert resolve_dtype(name) is dtype


def test_unknown_dtype_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="'half'; it must be auto, bfloat16 or float32"):
        resolve_dtype("half")


def test_pairs_become_halves_head_by_head() -> None:
    rows = torch.arange(8)[:, None]  # two heads of a0 b0 a1 b1
    assert halves_from_pairs(rows, 4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("kind", ["llama", "llama-linear", "llama-llama3", "gemma3-scaled"])
def test_inverse_frequencies_have_the_bits_of_transformers(kind: str, tmp_path: Path) -> None:
    oracle = tiny(kind)
    oracle.save_pretrained(tmp_path)
    spec = load_model(tmp_path, TorchOps(torch.float32)).spec
    rotary = oracle.model.rotary_emb
    for window, rope in zip(spec.layer_windows, spec.layer_ropes, strict=True):
        prefix = "" if kind.startswith("llama") else "full_attention_" if window is None else "sliding_attention_"
        assert torch.equal(inverse_frequencies(rope, spec.head_dim), getattr(rotary, f"{prefix}inv_freq"))


def test_rotary_table_at_far_positions_is_the_float32_product() -> None:
    table = rope_table(RopeSpec(1e6), 64, 8192)
    angle = torch.tensor(8191.0) * inverse_frequencies(RopeSpec(1e6), 64)
    assert table.cos.shape == table.sin.shape == (8192, 32)
    assert torch.allclose(table.cos[8191], angle.cos(), atol=1e-6, rtol=0)
    assert torch.allclose(table.sin[8191], angle.sin(), atol=1e-6, rtol=0)


def test_progress_names_what_is_done_and_ends_at_one(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    told: list[tuple[str, float]] = []
    load_model(tmp_path, TorchOps(torch.float32), lambda what, fraction: told.append((what, fraction)))
    assert [what for what, _ in told] == ["hashing weights"] * 2 + ["loading weights"] * 4
    assert told[-1] == ("loading weights", 1.0)


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing: no such file or folder"):
        load_model(tmp_path / "nothing", TorchOps(torch.float32))


def test_weights_are_packed_in_the_compute_dtype_and_a_tied_head_once(tmp_path: Path) -> None:
    held: list[torch.dtype] = []

    class Watching(TorchOps):
        def pack_linear(self, weight: torch.Tensor, *rest: Any, **options: Any):  # type: ignore[no-untyped-def]
            held.append(weight.dtype)
            return super().pack_linear(weight, *rest, **options)

    tiny("smollm").save_pretrained(tmp_path)
    load_model(tmp_path, Watching(torch.bfloat16))
    assert set(held) == {torch.bfloat16}
    assert len(held) == 1 + 4 * CONFIGS["smollm"]().num_hidden_layers
