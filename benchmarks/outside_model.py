"""Engine time outside the model step: schedule, prepare, sample, detokenise. A batch of 8 with a real model.

    python benchmarks/outside_model.py
    python benchmarks/outside_model.py --model gemma3-270m --steps 200

Greedy and filtered sampling take turns. A step's time outside the model is its whole time less the seconds in
``Model.forward``.
"""

from __future__ import annotations

import argparse
import random
import statistics

from headwater.engine.build import build_engine
from headwater.engine.core import EngineCore
from headwater.engine.messages import Submit
from headwater.engine.options import engine_config
from headwater.types import SamplingParams

CASES = {
    "greedy": {"temperature": 0.0},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_k 50, top_p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
}


def decode(core: EngineCore, case: str, repeat: int, batch: int, n_steps: int) -> list[float]:
    """Milliseconds outside the model of each decode step of one batch."""
    rng = random.Random(repeat)
    params = SamplingParams(**CASES[case], seed=repeat, max_tokens=n_steps, ignore_eos=True)  # type: ignore[arg-type]
    for row in range(batch):
        prompt = [rng.randrange(1000, 40_000) for _ in range(64)]
        if refused := core.submit(Submit(f"{case}-{repeat}-{row}", prompt, params)):
            raise RuntimeError(refused[0].error)
    outside = []
    while core.busy:
        for whole_s, model_s, n_tokens in core.step().stats.steps:
            if n_tokens == batch:
                outside.append(1e3 * (whole_s - model_s))
    return outside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100, help="decode steps of a repeat (default 100)")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    config = engine_config(args.model, {})
    core = build_engine(config, lambda what, fraction: None).core
    decode(core, "greedy", -1, args.batch, 8)
    found: dict[str, list[float]] = {case: [] for case in CASES}
    for repeat in range(args.repeats):
        for case in CASES:
            found[case] += decode(core, case, repeat, args.batch, args.steps)
    print(f"ms a step outside the model, batch {args.batch}, {core.info.dtype}, {core.info.threads} threads")
    for case, values in found.items():
        values.sort()
        p95 = values[int(0.95 * (len(values) - 1))]
        print(f"{case:24} median {statistics.median(values):7.3f}   p95 {p95:7.3f}   of {len(values)} steps")


if __name__ == "__main__":
    main()
