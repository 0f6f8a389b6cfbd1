"""A server whose cache, scheduler and engine core are real, and whose model is the fake runner: starts at once.

    python -m tests.serve.ui.real_cache "fake?blocks=256&fill=100" PORT [--ui-redact] [--admin-key KEY ...]

Bytes are tokens; answers are letters. ``fill`` publishes so many blocks of unlike prompts before the start.
"""

from __future__ import annotations

import argparse
import random

from headwater.cache.prefix import PrefixCache
from headwater.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig, UiConfig
from headwater.engine.core import EngineCore
from headwater.engine.messages import EngineInfo
from headwater.sched.scheduler import Scheduler
from headwater.serve.access import Access
from headwater.serve.run import Announce, bind, serve
from headwater.types import GroupKind, GroupSpec, Namespace, Progress
from tests.sched.fake_runner import FakeRunner
from tests.serve.fake_core import EOS, VOCAB, ByteTokenizer, settings

BLOCK = 16


class Tokenizer(ByteTokenizer):
    eos_ids = frozenset({EOS})
    special_ids = frozenset(range(EOS, VOCAB))


def build_core(config: EngineConfig, report: Progress) -> EngineCore:
    asked = settings(config.model.model)
    n_blocks = int(asked.get("blocks", 256))
    groups = [GroupSpec(GroupKind.FULL, BLOCK)]
    caching = CacheConfig(partial_reuse="partial" in asked)
    cache = PrefixCache(groups, n_blocks, config=caching)
    namespace = Namespace(b"weights")
    fill(cache, namespace, int(asked.get("fill", 0)))
    limits = SchedulerConfig(max_num_batched_tokens=512)
    scheduler = Scheduler(cache, limits, max_model_len=4096)
    runner = FakeRunner(groups, n_blocks, vocab_size=EOS)
    runner.next_token = lambda request, position: ord("a") + position % 26
    info = EngineInfo(
        model="fake",
        family="fake",
        max_model_len=scheduler.max_model_len,
        vocab_size=VOCAB,
        block_size=BLOCK,
        n_blocks=n_blocks,
        n_groups=1,
        min_reusable_tokens=BLOCK,
        dtype="float32",
        kv_cache_bytes=0,
        threads=1,
        enable_prefix_caching=True,
        hash_algo="sha256",
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        row_invariant=True,
    )
    rng = random.Random(1)
    return EngineCore(runner, scheduler, cache, Tokenizer(), info, namespace=namespace, rng=rng)  # type: ignore[arg-type]


def fill(cache: PrefixCache, namespace: Namespace, n_blocks: int) -> None:
    """Publish ``n_blocks`` blocks: prompts of 40 blocks that share their first 8, as content that nobody uses now."""
    rng = random.Random(7)
    system = [rng.randrange(32, 127) for _ in range(8 * BLOCK)]
    while (n_left := n_blocks - cache.stats().evictable) > 0:
        n_new = min(40 - 8, n_left)
        chain = cache.chain(namespace, system + [rng.randrange(32, 127) for _ in range(n_new * BLOCK)])
        holding = cache.claim(chain, cache.lookup(chain), "filling")
        cache.allocate(holding, len(chain))
        cache.publish(chain, holding, len(chain))
        cache.release(holding)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--admin-key")
    parser.add_argument("--no-ui", dest="ui", action="store_false")
    parser.add_argument("--ui-redact", action=argparse.BooleanOptionalAction)
    asked = parser.parse_args()
    keys = ServerConfig(
        api_keys=tuple(asked.api_key), admin_key=asked.admin_key, salt_secret=b"secret" if asked.api_key else None
    )
    serve(
        EngineConfig(model=ModelConfig(model=asked.model)),
        bind("127.0.0.1", asked.port),
        lambda: Tokenizer(),  # type: ignore[arg-type, return-value]
        served_name="fake",
        access=Access(keys),
        ui=UiConfig(asked.ui, asked.ui_redact),
        core="tests.serve.ui.real_cache:build_core",
        announce=Announce(ready=lambda front, url: print(f"ready {url}", flush=True)),
    )


if __name__ == "__main__":
    main()
