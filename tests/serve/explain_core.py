"""The real engine, with one request computed under an adapter before the first one comes: for "other identity", since
no request can ask for an adapter yet."""

from __future__ import annotations

import sys
from dataclasses import replace

from headwater.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from headwater.engine.build import build_engine
from headwater.engine.core import EngineCore
from headwater.engine.messages import Submit
from headwater.serve.run import Announce, bind, serve
from headwater.text.tokenizer import load_tokenizer
from headwater.types import Progress, SamplingParams

ADAPTED = list(range(5000, 5040))
"""The prompt of that request, in token ids."""


def build_core(config: EngineConfig, report: Progress) -> EngineCore:
    core = build_engine(config, report).core
    plain = core._namespace
    core._namespace = replace(plain, adapters=((b"adapter", 1.0),))
    core.submit(Submit("adapted", ADAPTED, SamplingParams(0.0, max_tokens=1)))
    while core.busy:
        core.step()
    core._namespace = plain
    return core


def main() -> None:
    """``python -m tests.serve.explain_core MODEL_FILE``: a server over this core, as ``headwater serve`` has it."""
    path = sys.argv[1]
    serve(
        EngineConfig(
            model=ModelConfig(model=path, threads=1, kernels="torch"),
            cache=CacheConfig(n_blocks=64),
            scheduler=SchedulerConfig(max_num_batched_tokens=256, max_model_len=700, in_flight_wait_s=0.0),
        ),
        bind("127.0.0.1", 0),
        lambda: load_tokenizer(path),
        served_name="the model",
        core="tests.serve.explain_core:build_core",
        announce=Announce(ready=lambda front, url: print(f"ready {url}", flush=True)),
    )


if __name__ == "__main__":
    main()
