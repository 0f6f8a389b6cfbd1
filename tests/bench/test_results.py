from __future__ import annotations

from pathlib import Path

import pytest

from headwater.bench.results import RESULTS, ResultsWriter, Sample, read_run, read_samples, write_run
from headwater.errors import BenchError


def sample(repeat: int) -> Sample:
    return Sample(kind="prefix", cell={"prefix": 16}, role="hit", repeat=repeat, request={}, started_s=0.0, events_s=[])


def test_lines_come_back(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path / "new" / "folder") as writer:
        for i in range(3):
            writer.write(sample(i))
            assert [one.repeat for one in read_samples(tmp_path / "new" / "folder")] == list(range(i + 1))


def test_half_a_last_line_is_passed_over_and_then_cut_off(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path) as writer:
        writer.write(sample(0))
    path = tmp_path / RESULTS
    whole = path.read_bytes()
    for cut in (1, 30, len(whole) - 1):  # wherever the kill came
        path.write_bytes(whole + whole[:cut])
        assert read_samples(tmp_path) == [sample(0)]
        with ResultsWriter(tmp_path) as writer:
            writer.write(sample(1))
        assert [one.repeat for one in read_samples(tmp_path)] == [0, 1]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path) as writer:
        writer.write(sample(0))
    path = tmp_path / RESULTS
    path.write_bytes(path.read_bytes() + b'{"kind": 7}\n')
    with pytest.raises(BenchError, match=r"results.jsonl, line 2 is no result"):
        read_samples(tmp_path)


def test_a_line_of_a_newer_version_is_read(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path) as writer:
        writer.write(sample(0))
    path = tmp_path / RESULTS
    path.write_bytes(path.read_bytes().replace(b'{"kind"', b'{"new":1,"kind"'))
    assert read_samples(tmp_path) == [sample(0)]


def test_run_json(tmp_path: Path) -> None:
    write_run(tmp_path, {"kind": "prefix"})
    assert read_run(tmp_path) == {"kind": "prefix"}
    with pytest.raises(BenchError, match="holds no results"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(BenchError, match="cannot be read"):
        read_run(tmp_path)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot be written"):
        ResultsWriter(tmp_path / "file")
