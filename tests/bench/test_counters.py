from __future__ import annotations

import pytest

from headwater.bench.counters import cached_tokens, parse, share, timing
from headwater.bench.results import Sample, Usage

ARTICLE_BEFORE = """
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1727.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 0.0
"""
ARTICLE_AFTER = ARTICLE_BEFORE.replace("1727.0", "3456.0").replace('name="m"} 0.0', 'name="m"} 1712.0')


def sample(before: str, after: str, usage: Usage | None = None, prompt_tokens: int = 1729) -> Sample:
    return Sample(
        kind="prefix",
        cell={},
        role="hit",
        repeat=0,
        request={"prompt_tokens": prompt_tokens, "max_tokens": 1},
        started_s=0.0,
        events_s=[],
        usage=usage,
        counters_before=parse(before).counters,
        counters_after=parse(after).counters,
    )


def test_the_articles_request_hit_1712_of_1729_tokens() -> None:
    counted = share(parse(ARTICLE_BEFORE).counters, parse(ARTICLE_AFTER).counters)
    assert (counted.queries, counted.hits) == (1729, 1712)
    assert counted.hit_rate is not None
    assert f"{counted.hit_rate:.2%}" == "99.02%"
    assert counted.hits == 107 * 16
    assert cached_tokens(sample(ARTICLE_BEFORE, ARTICLE_AFTER)) == (1712, "counters")


def test_counters_moved_by_another_request_are_not_this_ones() -> None:
    """Somebody else's 500 tokens were looked up in between: the counters no longer say what this request hit."""
    after = ARTICLE_AFTER.replace("3456.0", "3956.0")
    assert cached_tokens(sample(ARTICLE_BEFORE, after, Usage(1729, 1, 1712))) == (1712, "usage")
    assert cached_tokens(sample(ARTICLE_BEFORE, after)) is None


def test_a_restarted_server_says_nothing() -> None:
    counted = share({"queries": 500.0, "hits": 100.0}, {"queries": 20.0, "hits": 0.0})
    assert (counted.queries, counted.hits, counted.hit_rate) == (None, None, None)


def test_nothing_looked_up_is_no_rate() -> None:
    assert share({"queries": 5.0, "hits": 1.0}, {"queries": 5.0, "hits": 1.0}).hit_rate is None


def test_copied_tokens_count_as_cached() -> None:
    before = {"queries": 0.0, "hits": 0.0, "copied": 0.0}
    assert share(before, {"queries": 50.0, "hits": 32.0, "copied": 7.0}).cached == 39


def test_our_own_names_and_labels() -> None:
    text = """
headwater_prefix_cache_queries_total{model_name="a{b} c"} 17.0
headwater_requests_total{finish_reason="stop",model_name="m"} 2.0
headwater_requests_total{finish_reason="length",model_name="m"} 3.0 1700000000000
headwater_kv_blocks{model_name="m",state="evictable"} 4.0
headwater_kv_blocks{model_name="m",state="free"} 5.0
headwater_kv_pool_blocks{model_name="m"} 9.0
headwater_min_reusable_tokens 16
nonsense line
headwater_preemptions_total NaN
"""
    scrape = parse(text)
    assert scrape.exporter == "headwater"
    assert scrape.counters == {"queries": 17.0, "requests": 5.0}
    assert scrape.gauges == {"pool_blocks": 9.0, "blocks_evictable": 4.0, "block_size": 16.0}


def test_vllms_pool_is_in_labels() -> None:
    text = 'vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="640"} 1.0\n'
    assert parse(text).gauges == {"pool_blocks": 640.0, "block_size": 32.0}


@pytest.mark.parametrize("text", ["", "# HELP x y\n", "process_cpu_seconds_total 3.0\n", "<html>404</html>"])
def test_metrics_of_a_stranger(text: str) -> None:
    assert parse(text).exporter is None


def test_the_servers_own_times_need_exactly_one_request() -> None:
    before = {"timed_requests": 3.0, "queue_s": 1.0, "prefill_s": 2.0}
    after = {"timed_requests": 4.0, "queue_s": 1.5, "prefill_s": 2.25}
    assert timing(before, after) == {"queue_s": 0.5, "prefill_s": 0.25}
    assert timing(before, {**after, "timed_requests": 5.0}) is None
    assert timing({}, {}) is None
