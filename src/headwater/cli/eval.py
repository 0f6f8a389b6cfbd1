"""``headwater eval perplexity``"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from headwater.cli.loading import LoadingBar
from headwater.cli.serve import config_of
from headwater.config import EngineConfig
from headwater.engine.messages import EngineInfo
from headwater.eval.perplexity import PACKAGED_TEXT, Perplexity, measure_perplexity, packaged_text, read_text

DTYPE_NAMES = {"bf16": "bfloat16", "f32": "float32"}
"""What people also call them."""


def perplexity(arguments: argparse.Namespace) -> int:
    """Measure, and print the figures."""
    config = config_of(arguments)
    text = packaged_text() if arguments.text is None else read_text(Path(arguments.text))
    with LoadingBar() as bar:
        found = measure_perplexity(
            config,
            text,
            n_tokens=arguments.tokens,
            window=arguments.window,
            report=bar.report,
            against=reference_of(config, arguments.against),
        )
    out = Console(highlight=False, soft_wrap=True, emoji=False, markup=False)
    for line in lines(found, arguments.text or PACKAGED_TEXT, arguments.window):
        out.print(line)
    return 0


def reference_of(config: EngineConfig, against: str | None) -> EngineConfig | None:
    """The plain engine to compare with: nothing in int8, in the dtype asked for. Without one asked for, in the same
    dtype if ``config`` has something in int8; None where that would compare an engine with itself."""
    if against is None and config.model.quantization == "none" and config.cache.kv_dtype == "auto":
        return None
    dtype = config.model.dtype if against is None else DTYPE_NAMES.get(against, against)
    model = replace(config.model, quantization="none", dtype=dtype)
    return replace(config, model=model, cache=replace(config.cache, kv_dtype="auto"))


def lines(found: Perplexity, text: str, window: int) -> list[str]:
    """The figures as they are printed."""
    rows = [
        f"{found.info.model}: {_what(found.info)}",
        f"{found.n_tokens} tokens of {text}, in windows of {window}",
        f"  perplexity        {found.perplexity:.4f}",
    ]
    if found.against is not None:
        rows += [
            f"against {_what(found.against.info)}",
            f"  perplexity        {found.against.perplexity:.4f}",
            f"  ratio             {found.against.ratio:.4f}",
            f"  argmax agreement  {found.against.argmax_agreement:.4f}",
            f"  mean KL           {found.against.mean_kl:.5f} nats",
        ]
    return rows


def _what(info: EngineInfo) -> str:
    weights = "" if info.quantization == "none" else f", weights {info.quantization}"
    kv = "" if info.kv_dtype == "auto" else f", KV {info.kv_dtype}"
    return f"{info.dtype}{weights}{kv}"
