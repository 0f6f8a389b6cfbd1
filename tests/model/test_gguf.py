"""Reading GGUF: the metadata against the reference reader, every block type, and files that are wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quant_shape_to_byte_shape

from headwater.errors import ModelError
from headwater.gguf_file import GgufFile
from headwater.kernels.torch_ref import TorchOps
from headwater.model.load import load_model
from headwater.model.weights import gguf as gguf_weights
from headwater.model.weights.gguf import GgufWeights
from tests.model.tiny import tiny, write_gguf

Kind = gguf.GGMLQuantizationType
READABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
ROWS, COLUMNS = 7, 512


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, tiny("llama"), "llama")
    return path.read_bytes()


def written(tmp_path: Path, data: bytes) -> Path:
    (tmp_path / "m.gguf").write_bytes(data)
    return tmp_path / "m.gguf"


def load(path: Path) -> None:
    load_model(path, TorchOps(torch.float32))


def test_metadata_and_tensors_are_what_the_reference_reader_sees(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float32("a.f32", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_string("a.text", "größer ▁")
    writer.add_array("a.strings", ["", "x", "日本", "a" * 300])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.reals", [0.5, 1.5])
    writer.add_custom_alignment(64)
    rng = np.random.default_rng(0)
    tensors = {name: rng.random(shape, np.float32) for name, shape in [("m", (3, 5)), ("v", (7,)), ("c", (2, 3, 4))]}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = GgufFile(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    for key in ("a.u8", "a.i64", "a.f32", "a.yes", "a.text", "general.alignment"):
        assert ours.metadata[key] == theirs.fields[key].contents()
    assert ours.metadata["a.strings"].strings() == theirs.fields["a.strings"].contents()
    assert ours.metadata["a.numbers"].tolist() == [1, -2, 3]
    assert ours.metadata["a.reals"].tolist() == [0.5, 1.5]
    assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tensors[tensor.name].shape
        assert (info.offset, info.type_id) == (tensor.data_offset, tensor.tensor_type)
        assert bytes(ours.bytes_of(info, tensor.n_bytes)) == tensors[tensor.name].tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", READABLE)
def test_every_block_type_dequantises_as_the_gguf_package_does(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised = random_blocks(Kind[kind])
    write_gguf_with(tmp_path / "m.gguf", quantised, Kind[kind])
    monkeypatch.setattr(gguf_weights, "CHUNK_ELEMENTS", 2 * COLUMNS)  # so that the last chunk is a short one
    source = GgufWeights(tmp_path / "m.gguf")
    assert source.shapes["x.weight"] == (ROWS, COLUMNS)
    source.check_readable("x.weight")
    out = torch.empty(ROWS, COLUMNS, dtype=dtype)
    source.read_into("x.weight", out)
    want = torch.from_numpy(np.array(dequantize(quantised, Kind[kind]), np.float32)).to(dtype)
    assert want.isfinite().all() and want.abs().max() > 0
    assert torch.equal(out, want)


def random_blocks(kind: Kind) -> np.ndarray:
    """Random bytes of the type; for real numbers and for scales random bits would be NaN at times: try again."""
    rng = np.random.default_rng(kind.value)
    n_bytes = quant_shape_to_byte_shape((COLUMNS,), kind)[-1]
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = []
    while len(rows) < ROWS * n_bytes // block_bytes:
        block = rng.integers(0, 256, (1, block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            values = dequantize(block, kind)
        if np.isfinite(values).all() and np.abs(values).max() < 1e30:
            rows.append(block)
    return np.concatenate(rows).reshape(ROWS, n_bytes)


def write_gguf_with(path: Path, data: np.ndarray, kind: Kind) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.add_tensor("x.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["I32", "I8", "Q1_0"])
def test_an_unreadable_type_names_tensor_and_type(kind: str, tmp_path: Path) -> None:
    if kind not in Kind.__members__:
        pytest.skip(f"this version of gguf does not know {kind}")
    n_bytes = quant_shape_to_byte_shape((COLUMNS,), Kind[kind])[-1]
    write_gguf_with(tmp_path / "m.gguf", np.zeros((ROWS, n_bytes), np.uint8), Kind[kind])
    with pytest.raises(ModelError, match=rf"'x\.weight'.*{kind}"):
        GgufWeights(tmp_path / "m.gguf").check_readable("x.weight")


def test_a_type_number_of_the_future_names_tensor_and_number(tmp_path: Path, model_bytes: bytes) -> None:
    name = b"blk.1.ffn_up.weight"
    at = model_bytes.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and two of them
    data = model_bytes[:at] + struct.pack("<I", 999) + model_bytes[at + 4 :]
    with pytest.raises(ModelError, match=r"'blk\.1\.ffn_up\.weight'.*999"):
        load(written(tmp_path, data))


def test_truncated_anywhere_is_a_model_error(tmp_path: Path, model_bytes: bytes) -> None:
    size = len(model_bytes)
    for end in [*range(0, 2000, 37), *range(2000, size, size // 60), size - 1]:
        with pytest.raises(ModelError):
            load(written(tmp_path, model_bytes[:end]))


def test_random_damage_to_the_header_is_a_model_error_or_harmless(tmp_path: Path, model_bytes: bytes) -> None:
    rng = np.random.default_rng(5)
    n_refused = 0
    for _ in range(150):
        data = bytearray(model_bytes)
        for at in rng.integers(0, 1500, 3):
            data[at] = rng.integers(0, 256)
        try:
            load(written(tmp_path, bytes(data)))
        except ModelError:
            n_refused += 1
    assert n_refused > 50


@pytest.mark.parametrize("count", [2**20, 2**40, 2**63])
def test_huge_counts_are_refused_at_once(count: int, tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<I", 3)
    key = struct.pack("<Q", 1) + b"a"
    strings = head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, count)
    numbers = head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 4, count)
    nested = head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 9, count)
    long_string = head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IQ", 8, count)
    tensors = head + struct.pack("<QQ", count, 0)
    for data in (strings, numbers, nested, long_string, tensors):
        with pytest.raises(ModelError, match="truncated"):
            GgufFile(written(tmp_path, data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "general.architecture is missing"),
    ],
)
def test_other_files_say_what_they_are_not(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load(written(tmp_path, data))


def test_missing_tensor_is_named(tmp_path: Path, model_bytes: bytes) -> None:
    data = model_bytes.replace(b"blk.2.ffn_down.weight", b"blk.2.ffn_dawn.weight")
    with pytest.raises(ModelError, match=r"'blk\.2\.ffn_down\.weight' is missing"):
        load(written(tmp_path, data))


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", tensors={"blk.0.extra.weight": np.zeros(4, np.float32)})
    with pytest.raises(ModelError, match=r"'blk\.0\.extra\.weight' is not understood"):
        load(tmp_path / "m.gguf")


def test_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    bad = {"blk.1.attn_k.weight": np.zeros((24, 48), np.float32)}
    write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", tensors=bad)
    with pytest.raises(ModelError, match=r"'blk\.1\.attn_k\.weight' has shape \[24, 48\].*\[16, 48\]"):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'"),
        ({"expert_count": 8}, "expert_count is 8"),
        ({"rope.dimension_count": 4}, "rope.dimension_count is 4"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, "rope.scaling.factor is 0.0"),
    ],
)
def test_metadata_that_changes_the_numbers_is_refused_by_name(
    extra: dict[str, object], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", extra=extra)
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "m.gguf")


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny("llama"), "mamba")
    with pytest.raises(ModelError, match=r"'mamba'; supported are llama, qwen2, qwen3, gemma3"):
        load(tmp_path / "m.gguf")


def test_part_of_a_split_file_is_refused(tmp_path: Path, model_bytes: bytes) -> None:
    entry = struct.pack("<Q", 11) + b"split.count" + struct.pack("<IH", 2, 3)
    n_entries = struct.unpack_from("<Q", model_bytes, 16)[0]
    data = model_bytes[:16] + struct.pack("<Q", n_entries + 1) + entry + model_bytes[24:]
    with pytest.raises(ModelError, match=r"split\.count"):
        load(written(tmp_path, data))
