"""Linear layers by the native kernels (``cpu/matmul.cpp``): weights packed once at load, products with one call.

A row's result has the same bits whatever rows share the call, wherever it stands and however many threads there
are. Between the variants of the kernels float32 and bf16 products differ by rounding; int8 products do not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headwater.errors import KernelError
from headwater.kernels.ops import Int8Weight
from headwater.kernels.pages import Arena

COLUMNS = 32
"""Output features of a panel."""
STEP_BYTES = 64
"""K is filled up to whole steps of so many bytes."""
MAX_INT8_IN = 65_536
"""Input features up to which a sum of 255 * 127 stays below 2 ** 31."""
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""``enum Type`` of cpu/linear.h."""


class Bindable(Protocol):
    """A loaded kernel library (``cpu/library.py``)."""

    def bind(self, name: str, restype: Any, argtypes: Sequence[Any]) -> Any: ...


class _Weight(ctypes.Structure):
    """``struct Linear`` of cpu/linear.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("k", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("weight", ctypes.c_int32),
        ("product", ctypes.c_int32),
        ("compute", ctypes.c_int32),
        ("out", ctypes.c_int32),
        ("hadamard", ctypes.c_int32),
    )


class _Panels:
    """A packed weight [out_features, in_features] and the products with it.

    ``kind`` is what is stored, ``product`` what is multiplied, ``dtype`` what is given. Panels lie in ``arena``;
    weights that come from one arena share its memory (None: one of its own).
    """

    def __init__(
        self,
        library: Bindable,
        rows: Tensor,
        bias: Tensor | None,
        *,
        kind: torch.dtype,
        product: torch.dtype,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        scale: Tensor | None = None,
        offset: Tensor | None = None,
        hadamard: int = 0,
        arena: Arena | None = None,
    ) -> None:
        for given in (dtype, out_dtype):
            if given not in (torch.bfloat16, torch.float32):
                raise KernelError(f"native products compute in torch.bfloat16 or torch.float32, not in {given}")
        if rows.dim() != 2 or 0 in rows.shape:
            raise KernelError(f"a weight is [out_features, in_features], not {list(rows.shape)}")
        self.out_features, self.in_features = rows.shape
        self.dtype, self.out_dtype = dtype, out_dtype
        self._panels = _pack(library, rows, kind, Arena(0) if arena is None else arena)
        n = len(self._panels) * COLUMNS
        self._columns = (
            _filled(torch.ones(self.out_features) if scale is None else scale, n, torch.float32),
            _filled(torch.zeros(0) if offset is None else offset, n, torch.int32),
            _filled(torch.zeros(0) if bias is None else bias, n, torch.float32),
        )
        pointers = [part.data_ptr() for part in self._columns]
        sizes = (self.in_features, self.out_features)
        types = (TYPES[kind], TYPES[product], TYPES[dtype], TYPES[out_dtype])
        self._weight = _Weight(self._panels.data_ptr(), *pointers, *sizes, *types, hadamard)
        self._at = ctypes.addressof(self._weight)
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._multiply = library.bind("hw_linear", None, [pointer, pointer, integer, integer, pointer])
        self._look_up = library.bind("hw_rows", integer, [pointer, pointer, integer, pointer])
        self._size = dtype.itemsize

    @property
    def address(self) -> int:
        """Of the ``struct Linear``, as long as this object lives."""
        return self._at

    @property
    def bytes(self) -> int:
        """What the packed weight takes, and a product of few rows reads."""
        return sum(part.numel() * part.itemsize for part in (self._panels, *self._columns))

    def flops(self, n_rows: int) -> int:
        """Multiplications and additions of a product with so many rows."""
        return 2 * n_rows * self.in_features * self.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in_features] in ``dtype``, rows any distance apart -> [n, out_features] in ``out_dtype``. KernelError
        for another shape or dtype."""
        shape, stride = x.shape, x.stride()
        if len(shape) != 2 or shape[1] != self.in_features or stride[1] != 1 or x.dtype is not self.dtype:
            x = self._fitting(x)
            stride = x.stride()
        n = shape[0]
        out = torch.empty((n, self.out_features), dtype=self.out_dtype)
        self._multiply(self._at, x.data_ptr(), stride[0] * self._size, n, out.data_ptr())
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` int64 [n] of the weight -> [n, in_features] in ``dtype``: an embedding that shares its memory
        with the head. KernelError for an id that is no row."""
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise KernelError(f"rows are looked up by int64 [n], not by {ids.dtype} {list(ids.shape)}")
        ids = ids.contiguous()
        out = torch.empty((len(ids), self.in_features), dtype=self.dtype)
        n_good = self._look_up(self._at, ids.data_ptr(), len(ids), out.data_ptr())
        if n_good != len(ids):
            raise KernelError(f"row {int(ids[n_good])} of a weight with {self.out_features} rows")
        return out

    def _fitting(self, x: Tensor) -> Tensor:
        """``x`` with its elements side by side. KernelError if it is not for this layer at all."""
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype != self.dtype:
            raise KernelError(f"a layer of {self.dtype} [n, {self.in_features}] was given {x.dtype} {list(x.shape)}")
        return x.contiguous()


class NativeLinear(_Panels):
    """A float weight [out_features, in_features], rounded to ``dtype`` and packed; sums in float32."""

    def __init__(
        self,
        library: Bindable,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        arena: Arena | None = None,
    ) -> None:
        if weight.dtype not in (torch.float32, torch.bfloat16):
            weight = weight.float()
        super().__init__(
            library, weight, bias, kind=dtype, product=dtype, dtype=dtype, out_dtype=out_dtype, arena=arena
        )


class NativeInt8Linear(_Panels):
    """An int8 weight. Of activations in int8 the sums are exact: the same bits as ``int8_ref`` on every machine."""

    def __init__(
        self,
        library: Bindable,
        weight: Int8Weight,
        bias: Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        arena: Arena | None = None,
    ) -> None:
        values, size = weight.values, weight.hadamard
        if values.dtype != torch.int8:
            raise KernelError(f"an int8 weight holds torch.int8, not {values.dtype}")
        exact = weight.activations == "int8"
        if exact and values.shape[1] > MAX_INT8_IN:
            raise KernelError(f"{values.shape[1]} input features: at most {MAX_INT8_IN} sum up in 32 bits")
        if size < 0 or size & (size - 1) or (size and values.shape[1] % size):
            raise KernelError(f"{values.shape[1]} input features are not whole pieces of {size}, a power of two")
        super().__init__(
            library,
            values,
            bias,
            kind=torch.int8,
            product=torch.int8 if exact else dtype,
            dtype=dtype,
            out_dtype=out_dtype,
            scale=weight.scale,
            offset=128 * values.sum(1, dtype=torch.int32) if exact else None,
            hadamard=size,
            arena=arena,
        )


def _pack(library: Bindable, rows: Tensor, kind: torch.dtype, arena: Arena) -> Tensor:
    """[panels, dwords of K, COLUMNS, elements in a dword]"""
    n, k = rows.shape
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    elements = 4 // kind.itemsize
    dwords = -(-k * kind.itemsize // STEP_BYTES) * STEP_BYTES // 4
    panels = arena.take((-(-n // COLUMNS), dwords, COLUMNS, elements), kind)
    pointer, integer, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    pack = library.bind("hw_pack", None, [pointer, small, integer, integer, integer, small, pointer])
    row_bytes = rows.stride(0) * rows.itemsize
    pack(rows.data_ptr(), TYPES[rows.dtype], row_bytes, n, k, TYPES[kind], panels.data_ptr())
    return panels


def _filled(part: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """A value per column, with zeros up to ``n``."""
    out = torch.zeros(n, dtype=dtype)
    out[: len(part)] = part
    return out
