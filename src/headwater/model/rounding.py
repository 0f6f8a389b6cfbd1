"""Rounding a weight to int8 so that the product is close, not each number: what is rounded next makes up for errors.

Source: GPTQ, arXiv 2210.17323. With second moments M = mean of x x^T of the product's input, the error of an output row
is (w - q) M (w - q)^T. Inputs of language models are strongly correlated, so that an error in one element can be
undone by the others almost for free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels.int8_ref import QMAX

DAMPING = 0.001
"""Of the mean diagonal, added to it: moments of few tokens are not to be trusted in every direction."""
BLOCK = 32
"""Elements rounded before the rest of their rows are brought up to date."""
ROWS = 8192
"""Output rows at a time: what they work on stays small."""


def row_scales(weight: Tensor) -> Tensor:
    """float32 [out]: the largest element of a row becomes 127. 1 for a row of zeros."""
    top = weight.abs().amax(1)
    return torch.where(top > 0, top / QMAX, torch.ones_like(top))


def rounded(weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` float32 [out, in] as (values int8 [out, in], scale float32 [out]), for inputs with ``moments``.

    ``moments`` is symmetric, float32 [in, in]; what the inputs never do may be zero in it.
    """
    scale = row_scales(weight)
    factor = _compensation(moments)
    values = torch.empty(weight.shape, dtype=torch.int8)
    for at in range(0, len(weight), ROWS):
        part = slice(at, at + ROWS)
        values[part] = _rounded_rows(weight[part], scale[part], factor)
    return values, scale


def _compensation(moments: Tensor) -> Tensor:
    """Upper triangular U, U^T U being the inverse of the damped moments: row i says how the error of element i,
    divided by U[i, i], is spread over the elements after it."""
    damped = moments.double()
    mean = damped.diagonal().mean().clamp(min=1e-30)
    damped = damped + torch.eye(len(damped), dtype=torch.float64) * mean * DAMPING
    # Reversed, a lower triangular L is an upper one: damped = A A^T with A = reversed(L), and U = A^-1.
    upper = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    factor: Tensor = torch.linalg.solve_triangular(upper, torch.eye(len(damped), dtype=torch.float64), upper=True)
    return factor.float()


def _rounded_rows(weight: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
    left = (weight / scale[:, None]).t().contiguous()  # [in, out]: an element of all rows lies together
    values = torch.empty(left.shape, dtype=torch.int8)
    for at in range(0, len(left), BLOCK):
        end = min(at + BLOCK, len(left))
        errors = torch.empty_like(left[at:end])
        for i in range(at, end):
            value = left[i].round().clamp_(-QMAX, QMAX)
            values[i] = value.to(torch.int8)
            error = errors[i - at]
            torch.sub(left[i], value, out=error).div_(factor[i, i])
            left[i + 1 : end].addr_(factor[i, i + 1 : end], error, alpha=-1)
        left[end:].addmm_(factor[at:end, end:].t(), errors, alpha=-1)
    return values.t().contiguous()
