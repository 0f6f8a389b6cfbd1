"""The report: verdicts by what was measured, and files that hold nothing but what was measured."""

from __future__ import annotations

import base64
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from headwater.bench import plots
from headwater.bench.findings import find
from headwater.bench.readings import read_runs
from headwater.bench.report import Report, as_html, as_markdown, make_report, write_report
from headwater.bench.results import RESULTS, Sample, Usage
from headwater.cli.arguments import parse
from headwater.cli.bench_report import draw
from headwater.errors import BenchError, ConfigError, HeadwaterError
from tests.bench.made import Made, folder

SMALL = Made(prefixes=(128, 2048), outputs=(1, 32))
HOSTILE = (
    '<script src="http://evil.example/x.js"></script>"\'><img src=x onerror=alert(1)>|`[a](http://evil.example)$x_1$'
)


def reported(path: Path, made: Made, change: Callable[[Sample], Sample] = lambda one: one) -> Report:
    return make_report([folder(path, made, change)])


def flag_names(report: Report) -> set[str]:
    return {flag.name for flag in report.flags}


def table(report: Report, name: str) -> list[dict[str, str]]:
    found = next(one for one in report.tables if one.name == name)
    return [dict(zip(found.head, row, strict=True)) for row in found.rows]


# ---- verdicts ----------------------------------------------------------------------------------------


def test_a_clear_gain(tmp_path: Path) -> None:
    report = reported(tmp_path / "r", SMALL)
    assert re.fullmatch(
        r"Where the prefix was cached, the first token came sooner: with 2,048 shared tokens after 1\d\.\d ms instead "
        r"of 6\d\d ms, 0\.02\d \[0\.02\d?, 0\.0[23]\d?\] of the time \(medians of 10 and 10\)\.",
        report.verdict.headline,
    )
    assert report.flags == []
    text = " ".join(report.verdict.sentences)
    assert (
        "2,048 of 2,065 prompt tokens came from the cache (99.2%), and the wait for the first token fell by 9" in text
    )
    assert "These are two figures" in text and "Nor is the share of hits a share of memory saved" in text
    assert "Prefix caching does not make decoding faster" in text
    assert "A prefix that misses: no difference shown between caching on and off." in text
    assert "not equal meaning" in text


def test_no_difference_is_said_and_no_ratio_given(tmp_path: Path) -> None:
    report = reported(tmp_path / "r", SMALL.but(hit_saves=False))
    assert re.fullmatch(
        r"No difference shown between cached and fresh prefixes, in 4 conditions\. That is not proof of none: with "
        r"this noise and so many repeats, what takes more than 0\.[89]\d* of the time would not have been told apart\.",
        report.verdict.headline,
    )
    for name in ("ttft", "itl", "e2e"):
        assert {row[pair] for row in table(report, name) for pair in ("hit / control", "hit / off")} <= {
            "no difference shown",
            "-",
        }


def test_a_warm_cache_is_flagged_and_not_called_cold(tmp_path: Path) -> None:
    report = reported(tmp_path / "r", SMALL.but(warm=True))
    assert report.verdict.headline == "This run cannot say what prefix caching buys: warm cache."
    (warm,) = [flag for flag in report.flags if flag.name == "warm cache"]
    assert warm.grave
    assert warm.text.startswith(
        "80 of 80 requests whose prefix had never been sent in this run hit the cache, with up to 2,048"
    )
    assert "of the time" not in report.verdict.headline


def test_a_server_that_was_not_fresh_is_flagged_though_its_controls_missed(tmp_path: Path) -> None:
    starts = [{"caching": "on", "warm": True, "warm_why": "500 tokens had been looked up before the first request"}]
    report = make_report([folder(tmp_path / "r", SMALL, starts=starts)])
    assert [(flag.name, flag.grave) for flag in report.flags] == [("warm cache", False)]
    assert "500 tokens had been looked up" in report.flags[0].text
    assert "came sooner" in report.verdict.headline


def test_too_few_samples_decide_nothing(tmp_path: Path) -> None:
    report = reported(tmp_path / "r", SMALL.but(repeats=4))
    assert report.verdict.headline == "This run cannot say what prefix caching buys: n too small."
    assert (
        "No condition has more than 4 samples on both sides, and fewer than 5 decide nothing"
        in report.verdict.sentences[0]
    )
    assert {row["hit / control"] for row in table(report, "ttft")} == {"n too small"}
    assert all("[n too small] n=4" in row["hit, ms"] for row in table(report, "ttft"))


def fail_some(one: Sample) -> Sample:
    if one.repeat % 5:
        return one
    return msgspec.structs.replace(one, error="the server was silent for 300 s", ttft_s=None, e2e_s=None, events_s=[])


def test_errors_are_counted_and_in_no_figure(tmp_path: Path) -> None:
    report = reported(tmp_path / "r", SMALL, fail_some)
    assert flag_names(report) == {"errors"}
    assert report.flags[0].text == (
        "44 of 220 requests failed and are in no figure. The most frequent error: the server was silent for 300 s"
    )
    assert "came sooner" in report.verdict.headline
    assert all(row["hit, ms"].endswith("n=8") for row in table(report, "ttft"))


def test_all_failed(tmp_path: Path) -> None:
    report = reported(
        tmp_path / "r", SMALL, lambda one: msgspec.structs.replace(one, error="HTTP 500: no", ttft_s=None, e2e_s=None)
    )
    assert report.verdict.headline == "This run cannot say what prefix caching buys: errors."
    assert as_html(report)


def test_slower_hits_are_called_slower(tmp_path: Path) -> None:
    def slow(one: Sample) -> Sample:
        later = {"ttft_s": 3.0, "e2e_s": 4.0}
        return msgspec.structs.replace(one, **later) if one.role == "hit" else one

    report = reported(tmp_path / "r", SMALL.but(outputs=(1,)), slow)
    assert report.verdict.headline.startswith(
        "Where the prefix was cached, the first token came later in 2 of 2 conditions"
    )


def test_faster_decoding_is_not_credited_to_the_cache(tmp_path: Path) -> None:
    def quick(one: Sample) -> Sample:
        first = one.ttft_s or 0.0
        events = [first + 0.3 * (at - first) for at in one.events_s] if one.role == "hit" else one.events_s
        return msgspec.structs.replace(one, events_s=events)

    report = reported(tmp_path / "r", SMALL, quick)
    (sentence,) = [text for text in report.verdict.sentences if text.startswith("Time between tokens")]
    assert "Look for the cause elsewhere before crediting the cache" in sentence


# ---- flags -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "name", "grave"),
    [
        (SMALL.but(lag_s=0.5), "client lag", True),
        (SMALL.but(counters=False), "no counters", False),
        (SMALL.but(counters=False, usage=False), "cached tokens unknown", False),
        (SMALL.but(interference=("none", "evicting"), evicts=False), "eviction not shown", False),
        (SMALL.but(false_hits=True), "false hit", True),
        (SMALL.but(salts=False), "salt ignored", False),
        (SMALL.but(caches=False), "nothing hit", True),
        (SMALL.but(tokens_per_event=4, usage=False), "events of several tokens", False),
    ],
)
def test_what_must_be_known_is_flagged(tmp_path: Path, made: Made, name: str, grave: bool) -> None:
    assert {one.grave for one in reported(tmp_path / "r", made).flags if one.name == name} == {grave}


def test_hits_with_caching_off_are_flagged(tmp_path: Path) -> None:
    def hits_anyway(one: Sample) -> Sample:
        if one.cell["caching"] == "on":
            return one
        n = one.request["prompt_tokens"]
        return msgspec.structs.replace(one, usage=Usage(n, 1, n - 1), counters_before=None, counters_after=None)

    report = reported(tmp_path / "r", SMALL, hits_anyway)
    assert "off is not off" in flag_names(report)
    assert report.verdict.headline.startswith("This run cannot say")


def test_counters_that_contradict_the_usage_are_flagged(tmp_path: Path) -> None:
    def lie(one: Sample) -> Sample:
        used = one.usage or Usage()
        return msgspec.structs.replace(one, usage=Usage(used.prompt_tokens, used.completion_tokens, 7))

    assert "counters and usage differ" in flag_names(reported(tmp_path / "r", SMALL, lie))


def test_a_few_common_tokens_are_no_warm_cache(tmp_path: Path) -> None:
    def template(one: Sample) -> Sample:
        used = one.usage or Usage()
        if one.cell["caching"] == "off" or one.role == "hit":
            return one
        return msgspec.structs.replace(
            one, usage=Usage(used.prompt_tokens, used.completion_tokens, 3), counters_before=None, counters_after=None
        )

    report = reported(tmp_path / "r", SMALL, template)
    assert "common beginning" in flag_names(report)
    assert "warm cache" not in flag_names(report)
    assert {row[""] for row in table(report, "counter-examples")} == {"held"}


def test_what_the_run_itself_says_and_an_unfinished_run(tmp_path: Path) -> None:
    path = folder(tmp_path / "r", SMALL, flags=["the server was not fresh"], finished=False)
    report = make_report([path])
    assert flag_names(report) == {"said by the run", "unfinished"}


# ---- tables ------------------------------------------------------------------------------------------


def test_evicted_repeats_are_told_apart_from_hits(tmp_path: Path) -> None:
    report = reported(tmp_path / "r", SMALL.but(interference=("none", "evicting")))
    assert any("0 of 40 repeated prefixes still hit" in text for text in report.verdict.sentences)
    rows = table(report, "ttft")
    assert [row["interference"] for row in rows] == ["none"] * 4 + ["evicting"] * 4
    assert {row["hit / control"] for row in rows[4:]} == {"no difference shown"}


def test_cached_and_computed_tokens_come_from_counters_and_blocks_are_counted(tmp_path: Path) -> None:
    rows = table(reported(tmp_path / "r", SMALL), "tokens")
    hit = next(row for row in rows if row["request"] == "hit" and row["prefix"] == "2,048")
    told = (hit["prompt"], hit["cached"], hit["computed"], hit["cached share"], hit["KV blocks shared"], hit["told by"])
    assert told == ("2,065", "2,048", "17", "99.18%", "128", "counters")


def test_the_growth_line_and_the_split_are_told(tmp_path: Path) -> None:
    report = reported(tmp_path / "r", SMALL)
    (line,) = table(report, "growth")
    slope = float(line["a token of prefill, µs"].split()[0])
    assert 270 < slope < 330
    assert {row["queue, ms"] for row in table(report, "split")} == {"1.00"}


def test_quantiles_only_from_enough_samples(tmp_path: Path) -> None:
    rows = table(reported(tmp_path / "r", SMALL), "quantiles")
    first = next(row for row in rows if row["metric"] == "time to first token")
    gaps = next(row for row in rows if row["metric"] == "gaps of all requests")
    assert (first["P95, ms"], first["P99, ms"]) == ("n too small (< 20)", "n too small (< 100)")
    assert gaps["n"] == "310" and float(gaps["P99, ms"]) > 12


def test_engines_are_compared_in_one_report(tmp_path: Path) -> None:
    ours = folder(tmp_path / "ours", SMALL.but(label="ours"))
    theirs = folder(tmp_path / "theirs", SMALL.but(label="theirs", prompt_token_s=900e-6, seed=5))
    report = make_report([ours, theirs])
    assert "First token after a fresh prefix: ours sooner than theirs in 4, later in 0 of 4 conditions" in (
        " ".join(report.verdict.sentences)
    )
    assert {row["a / b"] for row in table(report, "across")} == {"ours / theirs"}
    assert len(report.runs) == 2


def test_two_folders_with_one_label_are_told_apart(tmp_path: Path) -> None:
    report = make_report([folder(tmp_path / "before", SMALL), folder(tmp_path / "after", SMALL.but(seed=1))])
    assert {row["a / b"] for row in table(report, "across")} == {"engine / engine (after)"}


def test_the_whole_report_has_one_correction(tmp_path: Path) -> None:
    """The same folder beside another one: p grows with the number of comparisons."""
    from headwater.bench.findings import find
    from headwater.bench.readings import read_runs

    alone = folder(tmp_path / "a", SMALL)
    other = folder(tmp_path / "b", SMALL.but(label="other", seed=3))

    def p_of(folders: list[Path]) -> float:
        found = next(
            one for one in find(read_runs(folders)).within if one.metric == "itl" and one.cell.label == "engine"
        )
        return found.found.p or 0.0

    assert p_of([alone]) < p_of([alone, other]) or p_of([alone]) == 1.0


# ---- files -------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Collects tags, and complains of those that are closed in another order than they were opened."""

    EMPTY = frozenset({"meta", "img", "br", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert tags.open == []
    return tags


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = tmp_path_factory.mktemp("hostile") / "r"
    made = SMALL.but(label=HOSTILE, repeats=6)
    return make_report([folder(path, made, server={"model": HOSTILE}, flags=[HOSTILE], command=["headwater", HOSTILE])])


def test_html_is_well_formed_and_fetches_nothing(hostile: Report) -> None:
    tags = parsed(as_html(hostile))
    names = {tag for tag, _ in tags.seen}
    assert names <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "section", "p", "ul", "li", "b"),
        *("figure", "img", "figcaption", "div", "table", "thead", "tbody", "tr", "th", "td"),
    }
    for tag, attributes in tags.seen:
        assert not any(name.startswith("on") or name in ("href", "srcset", "action") for name in attributes), tag
        assert (attributes.get("src") or "data:image/png;base64,").startswith("data:image/png;base64,")
    assert "url(" not in as_html(hostile) and "@import" not in as_html(hostile)


def test_images_are_inline_and_whole(hostile: Report) -> None:
    images = [attributes["src"] for tag, attributes in parsed(as_html(hostile)).seen if tag == "img"]
    assert len(images) == 5
    for source in images:
        data = base64.b64decode((source or "").partition(",")[2])
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert min(struct.unpack(">II", data[16:24])) > 200


def test_a_hostile_name_is_shown_and_not_obeyed(hostile: Report) -> None:
    html = as_html(hostile)
    assert "<script" not in html and "<img src=x" not in html
    assert "&lt;script src=&#34;http://evil.example" in html
    markdown = as_markdown(hostile)
    assert not re.search(r"(?<!\\)<|(?<!\\)`", markdown)
    assert not re.search(r"(?<![\\!])\[[^\]]*[^\\]\]\(", markdown)
    assert "http://" not in markdown


def test_markdown_tables_have_as_many_cells_in_every_row(hostile: Report) -> None:
    blocks = re.findall(r"(?:^\|.*\n)+", as_markdown(hostile), re.MULTILINE)
    assert len(blocks) >= 8
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_files_are_written_beside_the_results(tmp_path: Path) -> None:
    path = folder(tmp_path / "r", SMALL.but(repeats=5))
    arguments = parse(["bench", "report", str(path)])
    assert arguments.run(arguments) == 0
    names = {one.name for one in path.iterdir()}
    assert {"report.html", "report.md", "ttft.png", "itl.png", "e2e.png", "dilution.png", "growth.png"} <= names
    shown = re.findall(r"!\[[^\n]*\]\((\S+)\)", (path / "report.md").read_text())
    assert set(shown) <= names and len(shown) == 5


def test_a_cut_last_line_is_passed_over(tmp_path: Path) -> None:
    path = folder(tmp_path / "r", SMALL.but(repeats=5))
    whole = (path / RESULTS).read_bytes()
    (path / RESULTS).write_bytes(whole[:-40])
    n_lines = whole.count(b"\n")
    assert dict(make_report([path]).runs[0].rows)["requests"] == str(n_lines - 1)


# ---- refusals ----------------------------------------------------------------------------------------


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"holds no results: there is no run\.json"):
        make_report([tmp_path])


def test_an_empty_measurement_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "r", SMALL)
    (path / RESULTS).write_text("")
    with pytest.raises(BenchError, match="no request was measured yet"):
        make_report([path])


@pytest.mark.parametrize(
    ("words", "message"), [(["a", "a"], "given twice"), (["a", "b"], "give --out DIR"), (["a", "./a"], "given twice")]
)
def test_folders_that_make_no_comparison_are_refused(words: list[str], message: str) -> None:
    arguments = parse(["bench", "report", *words])
    with pytest.raises(ConfigError, match=message):
        arguments.run(arguments)


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    report = reported(tmp_path / "r", SMALL.but(repeats=2))
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwaterError, match="cannot be written into"):
        write_report(report, tmp_path / "file")


def test_odd_values_in_a_folder_do_not_break_its_report(tmp_path: Path) -> None:
    def odd(one: Sample) -> Sample:
        return msgspec.structs.replace(one, request={"prompt_tokens": "many", "max_tokens": None}, usage=None)

    path = folder(tmp_path / "r", SMALL, odd, flags="text", machine=[1], server="x", arguments=None, starts={"a": 1})
    report = make_report([path])
    assert as_html(report) and as_markdown(report)
    assert "said by the run" not in flag_names(report)


@pytest.mark.parametrize(
    ("package", "command"), [("scipy", "report x"), ("matplotlib", "report x"), ("httpx", "load mix")]
)
def test_without_the_extra_it_is_said_how_to_install_it(package: str, command: str) -> None:
    words = ["bench", *command.split()]
    code = f"import sys; sys.modules[{package!r}] = None\nfrom headwater.cli import main\nsys.exit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == f"headwater: error: headwater bench needs the package {package}: pip install 'headwater[bench]'\n"
    )


def test_panels_of_whole_requests_have_one_range_so_that_a_small_gain_looks_small(tmp_path: Path) -> None:
    made = Made(outputs=(1, 256), prefixes=(128, 2048), repeats=5)
    found = find(read_runs([folder(tmp_path, made)]))
    for metric in ("ttft", "e2e"):
        ends = {axes.get_ylim() for axes in plots.by_prefix(found, metric).axes}
        assert len(ends) == 1
        low, high = ends.pop()
        assert low < 1e3 * min(side.values[0] for (_, _, of), side in found.sides.items() if of == metric)
        assert high > 1e3 * max(side.estimate.median for (_, _, of), side in found.sides.items() if of == metric)


def test_how_to_read_a_load_says_nothing_of_hits_and_intervals(tmp_path: Path) -> None:
    load = reported(tmp_path / "load", Made(repeats=2), lambda one: msgspec.structs.replace(one, kind="load"))
    sweep = reported(tmp_path / "sweep", Made(repeats=5))
    assert "Control" not in " ".join(load.reading)
    assert "Control" in " ".join(sweep.reading)


def test_without_a_difference_no_gain_is_spoken_of(tmp_path: Path) -> None:
    said = " ".join(reported(tmp_path, Made(hit_saves=False, repeats=5)).verdict.sentences)
    assert "less of the gain" not in said


def test_a_name_cannot_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw([folder(tmp_path / "a", Made(label="\x1b[2Jone\nline")), folder(tmp_path / "b", Made())], tmp_path / "c")
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert " [2Jone line: " in said
