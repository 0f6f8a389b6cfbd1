"""Int8 weights: the rewriting changes nothing, the rounding little, and what is kept on disk is what was made."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwater.errors import ConfigError
from headwater.kernels.int8_ref import hadamard, quantize_rows
from headwater.kernels.ops import Int8Weight, Linear
from headwater.kernels.torch_ref import TorchOps
from headwater.model import load as load_module
from headwater.model.assemble import Assembler
from headwater.model.calibrate import Calibration
from headwater.model.decoder import Model
from headwater.model.load import load_model
from headwater.model.rotate import Rewriter, power_of_two_in, walsh
from headwater.model.rounding import rounded, row_scales
from headwater.model.tensors import Matrix, OuterTensors, TensorReader
from headwater.model.weights.open import open_weights
from tests.model.dense import all_logits
from tests.model.tiny import CONFIGS, sequences, tiny, write_gguf

FLOAT = torch.float32


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    def write(kind: str) -> Path:
        path = tmp_path / kind
        tiny(kind).save_pretrained(path)
        return path

    return write


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest difference of logits, as a share of the largest logit."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))


def relative_rms(got: list[Tensor], want: list[Tensor]) -> float:
    return max(float((a - b).square().mean().sqrt() / b.square().mean().sqrt()) for a, b in zip(got, want, strict=True))


# ---- the transform --------------------------------------------------------------------------------------


def test_walsh_is_the_kernels_transform() -> None:
    x = torch.randn(3, 2, 48, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(walsh(x, 16), hadamard(x, 16), atol=1e-5)
    assert [power_of_two_in(n) for n in (1, 6, 640, 1024)] == [1, 2, 128, 1024]


# ---- the rewritten model is the model -------------------------------------------------------------------


class Transformed:
    """A float product of a transformed input."""

    def __init__(self, matrix: Matrix, product: Linear) -> None:
        self.out_features, self.in_features = matrix.weight.shape
        self.dtype = product.dtype
        self._pieces = matrix.hadamard
        self._product = product

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(hadamard(x, self._pieces) if self._pieces else x)


def rewritten(path: Path) -> Model:
    """The model of ``path`` in float32 after everything that ``Rewriter`` does."""
    ops, reader = TorchOps(FLOAT), TensorReader(open_weights(path), FLOAT)
    rewriter = Rewriter(reader.spec)
    outer = OuterTensors(reader.embed(), reader.final_norm(), rewriter.head(reader.head()))
    layers = [rewriter.layer(reader.layer(i)) for i in range(reader.spec.n_layers)]
    return Assembler(reader.spec, ops, 128).model(
        outer,
        layers,
        lambda m, out_dtype: Transformed(m, ops.pack_linear(m.weight, m.bias, out_dtype=out_dtype)),
        b"",
        lambda what, fraction: None,
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_rewritten_model_has_the_logits_of_the_model(kind: str, folder: Callable[[str], Path]) -> None:
    path = folder(kind)
    plain = load_model(path, TorchOps(FLOAT))
    assert worst(all_logits(rewritten(path), sequences()), all_logits(plain, sequences())) < 1e-4


@pytest.mark.parametrize("kind", ["llama-biases", "gemma3"])
def test_every_product_is_rewritten_and_those_of_plain_inputs_transform_them(
    kind: str, folder: Callable[[str], Path]
) -> None:
    reader = TensorReader(open_weights(folder(kind)), FLOAT)
    before, after = reader.layer(1), Rewriter(reader.spec).layer(reader.layer(1))
    for part in ("qkv", "o", "gate_up", "down"):
        change = (getattr(after, part).weight - getattr(before, part).weight).abs().mean()
        assert change > 0.1 * getattr(before, part).weight.abs().mean()
    assert (after.qkv.hadamard, after.o.hadamard, after.gate_up.hadamard, after.down.hadamard) == (16, 0, 16, 16)


# ---- rounding -------------------------------------------------------------------------------------------


def correlated(n: int, size: int) -> Tensor:
    """Inputs as in a language model: a few directions carry most of them."""
    generator = torch.Generator().manual_seed(5)
    spread = torch.logspace(0, -2, size)
    mix = torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
    return torch.randn(n, size, generator=generator) * spread @ mix


def test_rounding_by_moments_makes_the_product_closer_than_rounding_to_nearest() -> None:
    x, weight = correlated(2000, 96), torch.randn(70, 96, generator=torch.Generator().manual_seed(1))
    values, scale = rounded(weight, x.t() @ x / len(x))
    nearest, nearest_scale = quantize_rows(weight)
    assert torch.allclose(scale, nearest_scale[:, 0])

    def error(rounded_weight: Tensor) -> float:
        return float((x @ (rounded_weight - weight).t()).square().mean())

    assert error(values * scale[:, None]) < 0.35 * error(nearest * nearest_scale)


def test_without_correlation_rounding_is_to_nearest() -> None:
    weight = torch.randn(8, 40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rounded(weight, torch.eye(40))[0], quantize_rows(weight)[0])


def test_rows_of_zeros_and_inputs_that_never_come_are_no_trouble() -> None:
    weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    weight[1] = 0
    values, scale = rounded(weight, torch.zeros(8, 8))
    assert torch.equal(values, quantize_rows(weight)[0])
    assert bool((values[1] == 0).all()) and scale[1] == 1 and bool(torch.isfinite(scale).all())


def test_scales_put_the_largest_element_at_127() -> None:
    assert torch.allclose(row_scales(torch.tensor([[1.0, -254.0], [0.0, 0.0]])), torch.tensor([2.0, 1.0]))


@pytest.mark.parametrize("kind", ["smollm", "gemma3", "qwen2"])
def test_moments_are_those_of_what_the_products_read(kind: str, folder: Callable[[str], Path]) -> None:
    """Against the same model run whole, with the inputs noted."""
    path = folder(kind)
    ops, reader = TorchOps(FLOAT), TensorReader(open_weights(path), FLOAT)
    calibration = Calibration(reader.spec, ops, reader.embed(), sequences())
    moments = [calibration.layer(reader.layer(i)) for i in range(reader.spec.n_layers)]
    head = calibration.head(reader.final_norm(), 0)
    model = load_model(path, ops)
    seen: dict[int, list[Tensor]] = {}
    for linear in model.linears:
        note(linear, seen.setdefault(id(linear), []))
    all_logits(model, sequences())
    for linear, want in zip(
        model.linears,
        [head, *(m for part in moments for m in (part.qkv, part.o, part.gate_up, part.down))],
        strict=True,
    ):
        x = torch.cat(seen[id(linear)]).float()
        assert len(x) == sum(len(tokens) for tokens in sequences())
        assert torch.allclose(x.t() @ x / len(x), want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


def note(linear: Any, inputs: list[Tensor]) -> None:
    """Only what comes from outside: ``apply`` calls itself for parts of its rows."""
    apply, depth = linear.apply, [0]

    def noting(x: Tensor, rule: Any) -> Tensor:
        if depth[0] == 0:
            inputs.append(x.clone())
        depth[0] += 1
        out = apply(x, rule)
        depth[0] -= 1
        return out

    linear.apply = noting


# ---- whole models ---------------------------------------------------------------------------------------

# A tiny model of random weights is far more sensitive than a trained one; measured, with room.
BOUNDS = {"w8a16": 0.1, "w8a8": 0.2}


@pytest.mark.parametrize("scheme", BOUNDS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_in_int8_are_near(kind: str, scheme: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = folder(kind)
    plain = all_logits(load_model(path, TorchOps(FLOAT)), sequences())
    model = load_model(path, TorchOps(FLOAT), cache_dir=tmp_path / "cache", quantization=scheme)
    got = all_logits(model, sequences())
    assert 1e-5 < relative_rms(got, plain) < BOUNDS[scheme]


def test_every_product_is_int8_by_the_scheme(folder: Callable[[str], Path], tmp_path: Path) -> None:
    packed: list[Int8Weight] = []

    class Watching(TorchOps):
        def pack_int8(self, weight: Int8Weight, *rest: Any, **options: Any):  # type: ignore[no-untyped-def]
            packed.append(weight)
            return super().pack_int8(weight, *rest, **options)

    path = folder("smollm")
    for scheme, activations in (("w8a8", "int8"), ("w8a16", "compute")):
        packed.clear()
        load_model(path, Watching(torch.bfloat16), cache_dir=tmp_path / "cache", quantization=scheme)
        assert len(packed) == 1 + 4 * CONFIGS["smollm"]().num_hidden_layers
        assert {weight.activations for weight in packed} == {activations}


def test_a_gguf_is_a_source_like_any_other(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, tiny("smollm"), "llama", quantise=gguf.GGMLQuantizationType.F16)
    plain = all_logits(load_model(file, TorchOps(FLOAT)), sequences())
    model = load_model(file, TorchOps(FLOAT), cache_dir=tmp_path / "cache", quantization="w8a16")
    assert 1e-5 < relative_rms(all_logits(model, sequences()), plain) < BOUNDS["w8a16"]


def test_an_unknown_scheme_is_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'w4'; it must be none, w8a8 or w8a16"):
        load_model(folder("smollm"), TorchOps(FLOAT), cache_dir=tmp_path, quantization="w4")


# ---- what is kept ---------------------------------------------------------------------------------------


class Kept:
    """A model, its cache folder, and how often its int8 weights were made."""

    def __init__(self, path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.cache, self.n_made = path, cache, 0
        make = load_module.Quantizer.model

        def counting(*args: Any) -> Any:
            self.n_made += 1
            return make(*args)

        monkeypatch.setattr(load_module.Quantizer, "model", counting)

    def logits(self, scheme: str = "w8a8", dtype: torch.dtype = FLOAT, read: list[list[int]] | None = None) -> Tensor:
        """``read`` is what the model reads while its int8 weights are made; None: random token ids."""
        sample = None if read is None else lambda vocab_size: read
        model = load_model(self.path, TorchOps(dtype), cache_dir=self.cache, quantization=scheme, sample=sample)
        return torch.cat(all_logits(model, sequences()))

    @property
    def file(self) -> Path:
        (file,) = (self.cache / "quantized").iterdir()
        return file


@pytest.fixture
def kept(folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(folder("qwen3-biases"), tmp_path / "cache", monkeypatch)


def test_the_second_start_makes_nothing_and_has_the_same_bits(kept: Kept) -> None:
    first = kept.logits()
    assert torch.equal(kept.logits(), first)
    assert kept.n_made == 1


def test_schemes_dtypes_and_weights_have_files_of_their_own(kept: Kept) -> None:
    for scheme, dtype in (("w8a8", FLOAT), ("w8a16", FLOAT), ("w8a8", torch.bfloat16)):
        kept.logits(scheme, dtype)
    weights = load_file(kept.path / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, kept.path / "model.safetensors", {"format": "pt"})
    kept.logits()
    assert kept.n_made == len(list((kept.cache / "quantized").iterdir())) == 4


def test_weights_rounded_by_another_text_are_not_taken_for_these(kept: Kept) -> None:
    """Weights that were made without a text, by a tool or a test, once served in place of better ones."""
    by_chance = kept.logits()
    by_text = kept.logits(read=[[1, 2, 3, 4] * 8])
    assert kept.n_made == 2 and not torch.equal(by_text, by_chance)
    assert torch.equal(kept.logits(read=[[1, 2, 3, 4] * 8]), by_text) and torch.equal(kept.logits(), by_chance)
    assert kept.n_made == 2


def flip_last_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def replace_by_text(file: Path) -> None:
    file.write_text("not a safetensors file")


def make_empty(file: Path) -> None:
    file.write_bytes(b"")


def resaved(change: Callable[[dict[str, Tensor], dict[str, str]], None]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        with safe_open(file, framework="pt") as handle:
            metadata = dict(handle.metadata())
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        change(tensors, metadata)
        save_file(tensors, file, metadata)

    return damage


def other_model(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata["weights"] = "00" * 32


def older_recipe(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata["recipe"] = "0"


def no_metadata(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata.clear()
    metadata["format"] = "pt"


def a_tensor_less(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    del tensors["layers.1.qkv.values"]


def a_tensor_less_and_nobody_says_so(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    del tensors["layers.1.qkv.values"]
    digests = json.loads(metadata["digests"])
    del digests["layers.1.qkv.values"]
    metadata["digests"] = json.dumps(digests)


def other_shape(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["layers.1.qkv.values"] = tensors["layers.1.qkv.values"].t().contiguous()


def another_transform(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    hadamard = json.loads(metadata["hadamard"])
    hadamard["layers.0.o"] = 8 - hadamard["layers.0.o"]
    metadata["hadamard"] = json.dumps(hadamard)


def other_activations(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata["activations"] = "mnt8"


DAMAGES = {
    "a flipped bit": flip_last_byte,
    "half a file": cut_in_half,
    "no such file at all": replace_by_text,
    "nothing": make_empty,
    "another model's": resaved(other_model),
    "an older recipe": resaved(older_recipe),
    "another program's": resaved(no_metadata),
    "a tensor less": resaved(a_tensor_less),
    "a tensor less, digests to match": resaved(a_tensor_less_and_nobody_says_so),
    "a flipped bit in what it says of a product": resaved(another_transform),
    "a flipped bit in the scheme": resaved(other_activations),
    "a tensor of another shape": resaved(other_shape),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_is_made_again(damage: str, kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    first = kept.logits()
    DAMAGES[damage](kept.file)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(kept.logits(), first)
    assert kept.n_made == 2 and "made again" in caplog.text
    assert torch.equal(kept.logits(), first)
    assert kept.n_made == 2


def test_where_nothing_can_be_kept_it_is_made_every_time(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    kept.cache.mkdir()
    (kept.cache / "quantized").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert torch.equal(kept.logits(), kept.logits())
    assert kept.n_made == 2 and "cannot be kept" in caplog.text


def test_nothing_half_written_is_left(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headwater.model.quantized_file.os.replace", full)
    kept.logits()
    assert list((kept.cache / "quantized").iterdir()) == []
