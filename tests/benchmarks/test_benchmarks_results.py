"""Medians, ratios, bars, tables and charts: the arithmetic between readings and what is printed."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

import charts
import machine
import report
import timing
from results import BenchmarkFailed, Claim, Part, Report, Results, amount, median, needed_repeats, paired_ratios, percentile, show


@pytest.mark.parametrize(
    ("value", "bar", "direction", "holds"),
    [
        (1.0, 1.0, "at least", True),
        (0.99, 1.0, "at least", False),
        (1.0, 1.0, "at most", True),
        (1.01, 1.0, "at most", False),
        (math.nan, 1.0, "at least", False),
        (math.nan, 1.0, "at most", False),
        (math.inf, 1.0, "at least", False),
        (-math.inf, 1.0, "at most", False),
        (5.0, None, "at least", None),
    ],
)
def test_bar(value: float, bar: float | None, direction: str, holds: bool | None) -> None:
    assert Claim("row", "", value, "×", value, value, bar, direction).holds is holds  # type: ignore[arg-type]


def test_claim_is_the_median_with_its_extremes() -> None:
    claim = Claim.of("row", "peer", [3.0, 1.0, 2.0, 10.0], "×")
    assert (claim.value, claim.least, claim.most) == (2.5, 1.0, 10.0)


def test_ratios_are_of_pairs_and_not_of_medians() -> None:
    assert median(paired_ratios([10, 1, 9], [5, 1, 3])) == 2.0
    with pytest.raises(ValueError, match="longer"):
        paired_ratios([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="against 0"):
        paired_ratios([1.0], [0.0])


def test_percentile_and_median_of_few_and_none() -> None:
    assert percentile([5.0, 1.0, 3.0], 0.5) == 3.0
    assert percentile([1.0, 2.0], 0.99) == 2.0
    assert math.isnan(percentile([], 0.5))
    assert math.isnan(median([]))


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,234 ms"), (12.34, "12.3 ms"), (1.234, "1.23 ms"), (0.1234, "0.123 ms"), (math.nan, "–")]
)
def test_amount(value: float, text: str) -> None:
    assert amount(value, "ms") == text


FACTS = machine.Machine("A processor", ("avx2",), 2, 2, "2.13", 20e9, 3.0, 1e9, 60e9).as_json()


def result(benchmark: str = "serving") -> Report:
    reading = {"kind": "", "server": "graftwork", "mix": "base", "streams": 8, "output_tokens_per_s": 30.0}
    other = {**reading, "kind": "vllm", "server": "vLLM, 8 slots", "output_tokens_per_s": 10.0}
    either = Claim.of("added", "", [9.0], "ms", 3.0, "at most")
    claims = [
        Claim.of("8 streams <base>", "vLLM & others", [3.0], "×", 1.5),
        Claim("row", "", math.nan, "ms", 0.0, 1.0, 2.0),
        Claim.of("either", "", [0.9] * 5, "×", 0.8, alternative=either),
    ]
    return Report(benchmark, "A base", [Part("base-8", dict(FACTS), {"input": 128}, claims, [reading, other])])


def test_report_comes_back_from_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "folder" / "out.json"
    results = Results("serving", "A base", path)
    results.put(result().parts[0])
    show(results.report, as_json=True)
    printed = capsys.readouterr().out
    assert printed.strip() == path.read_text().strip()
    assert [claim["holds"] for claim in json.loads(printed)["parts"][0]["claims"]] == [True, False, True]
    back = Report.read(path)
    assert (back.claims[0], back.claims[2]) == (result().claims[0], result().claims[2])
    assert math.isnan(back.claims[1].value)
    assert (back.parts[0].machine, back.parts[0].settings, back.readings) == (FACTS, {"input": 128}, result().readings)
    assert [file.name for file in path.parent.iterdir()] == ["out.json"]


def part(name: str, value: float) -> Part:
    return Part(name, {}, {}, [Claim.of(name, "", [value], "ms")])


def test_rows_that_are_measured_again_replace_those_of_their_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    first = Results("serving", "A base", path)
    for name in ("a", "b"):
        first.put(part(name, 1.0))
        assert Report.read(path).parts[-1].name == name, "a kill loses no more than the row in progress"
    second = Results("serving", "A base", path)
    second.put(part("c", 2.0))
    second.put(part("a", 3.0))
    assert [(claim.row, claim.value) for claim in Report.read(path).claims] == [("a", 3.0), ("b", 1.0), ("c", 2.0)]
    show(second.report, as_json=False, only=["c"])
    assert "2.00 ms" in (printed := capsys.readouterr().out)
    assert "1.00 ms" not in printed


@pytest.mark.parametrize(("benchmark", "base"), [("kernels", "A base"), ("serving", "Another")])
def test_results_of_another_benchmark_or_base_are_not_mixed(tmp_path: Path, benchmark: str, base: str) -> None:
    path = tmp_path / "out.json"
    Results("serving", "A base", path).put(part("a", 1.0))
    with pytest.raises(BenchmarkFailed, match="holds results of serving over A base"):
        Results(benchmark, base, path)


def test_a_result_that_cannot_be_written_is_refused_before_it_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchmarkFailed, match="cannot be written"):
        Results("serving", "A base", tmp_path / "file" / "out.json")


@pytest.mark.parametrize(
    ("bar", "unit", "needed"),
    [(0.95, "×", 7), (1.05, "×", 7), (0.97, "×", 7), (0.94, "×", 5), (1.1, "×", 5), (60.0, "%", 5), (1.0, "ms", 5), (None, "×", 0)],
)
def test_bars_near_1_need_more_repetitions(bar: float | None, unit: str, needed: int) -> None:
    assert needed_repeats(bar, unit) == needed
    short = Claim.of("row", "", [1.0] * max(1, needed - 1), unit, bar, note="small load")
    assert short.remarks == (f"short: {needed - 1} of {needed} repetitions; small load" if needed else "small load")
    assert Claim.of("row", "", [1.0] * max(1, needed), unit, bar).remarks == ""


@pytest.mark.parametrize(("ratio", "added", "holds"), [(0.8, 9.0, True), (0.5, 2.0, True), (0.8, 2.0, True), (0.5, 9.0, False)])
def test_of_two_bars_one_is_enough_and_the_verdict_is_one(ratio: float, added: float, holds: bool) -> None:
    other = Claim.of("added time", "base", [added], "ms", 3.0, "at most")
    claim = Claim.of("row", "base", [ratio], "×", 0.75, alternative=other)
    assert claim.holds is holds
    assert claim.cells[2] == f"{amount(ratio, '×')} or {amount(added, 'ms')}"
    assert claim.cells[4:] == ("at least 0.750 × or at most 3.00 ms", "yes" if holds else "no")


def test_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    show(result(), as_json=False)
    printed = capsys.readouterr().out
    assert "at least 1.50 ×" in printed
    assert "yes" in printed


@pytest.mark.parametrize("content", ["", "[]", "{}", "7", '{"format": 2, "benchmark": "x", "base": "", "parts": [{}]}'])
def test_what_is_no_result_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(BenchmarkFailed, match=r"bad\.json is no result"):
        Report.read(tmp_path / "bad.json")
    with pytest.raises(BenchmarkFailed, match=r"missing\.json"):
        Report.read(tmp_path / "missing.json")


def test_results_of_an_older_version_are_refused_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.json").write_text('{"benchmark": "serving", "machine": {}, "claims": [], "readings": []}')
    assert report.main([str(tmp_path / "old.json"), "--docs", str(tmp_path)]) == 1
    assert "another version of the benchmarks; remove it and measure again" in capsys.readouterr().err


def test_page_is_made_of_results_and_can_be_made_again(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    unbarred = [Claim.of("norms", "reference", [2.0], "×")]
    roofline = [{"case": "norms", "candidate": "cpu", "roofline": 0.5}]
    kernels = Report("kernels", "A base", [Part("small", {**FACTS, "read_gb_s": 21.0}, {}, unbarred, roofline)])
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for one, path in zip((result(), kernels), files, strict=True):
        path.write_text(one.as_json())
    for _ in range(2):
        assert report.main([*map(str, files), "--docs", str(tmp_path)]) == 0
        text = page.read_text()
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert "\nold\n" not in text
        assert text.count("| 8 streams <base> |") == 1
        assert "serving (base-8): A processor" in text
        assert "reads 20.0 GB/s" in text
        assert "reads 21.0 GB/s" in text
        assert "| 0.900 × or 9.00 ms |" in text
        assert "short: 1 of 5 repetitions" in text
        assert "| norms |" not in text
    for name in (report.THROUGHPUT, report.ROOFLINE):
        assert text.count(f"({name})") == 1
        ElementTree.fromstring((tmp_path / name).read_text())


def test_page_is_made_where_there_is_none_and_its_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = Report("step", "", [Part("greedy, 64", {}, {}, [Claim.of("overhead", "", [0.5] * 5, "ms", 1.0, "at most")])])
    (tmp_path / "a.json").write_text(steps.as_json())
    (tmp_path / "b.json").write_text(result().as_json())
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert report.main([*files, "--docs", str(tmp_path / "new"), "--json"]) == 0
    assert "| overhead |  | 0.500 ms |" in (tmp_path / "new" / "performance.md").read_text()
    printed = json.loads(capsys.readouterr().out)
    assert [(claim["row"], claim["holds"]) for claim in printed["claims"]][-1] == ("overhead", True)
    assert [(one["benchmark"], one["parts"], one["read_gb_s"]) for one in printed["machines"]] == [("serving", ["base-8"], 20.0)]


def test_page_without_its_marks_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "performance.md").write_text("mine")
    (tmp_path / "a.json").write_text(result().as_json())
    assert report.main([str(tmp_path / "a.json"), "--docs", str(tmp_path)]) == 1
    assert report.BEGIN in capsys.readouterr().err
    assert (tmp_path / "performance.md").read_text() == "mine"


def test_chart_draws_bars_to_scale_and_escapes_text() -> None:
    groups = [charts.Group("a & <b>", (charts.Bar("ours", 100.0), charts.Bar("peer", 25.0)))]
    root = ElementTree.fromstring(charts.bar_chart('"title" & more', "tokens/s", groups))
    rects = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.get("height") == str(charts.BAR)]
    widths = [float(rect.get("width", "0")) for rect in rects]
    assert widths[0] == pytest.approx(4 * widths[1], abs=0.3)
    assert len({rect.get("fill") for rect in rects}) == 2
    assert any(text.text == "a & <b>" for text in root.iter("{http://www.w3.org/2000/svg}text"))
    for bad in ([], [charts.Group("x", (charts.Bar("s", math.nan),))]):
        with pytest.raises(ValueError, match="needs bars"):
            charts.bar_chart("t", "", bad)


def test_candidates_of_a_case_take_turns() -> None:
    now, order = [0.0], []

    def takes(name: str, seconds: float) -> None:
        order.append(name)
        now[0] += seconds

    case = timing.Case("case", {"cpu": lambda: takes("cpu", 1.0), "reference": lambda: takes("reference", 4.0)})
    timed = timing.run_case(case, budget_s=20.0, clock=lambda: now[0])
    forth, back = ["cpu", "reference"], ["reference", "cpu"]
    assert order == forth + (forth + back) * 4, "one round to warm up, then rounds of 5 s until 40 s are used up"
    assert len(timing.run_case(case, budget_s=0.1, clock=lambda: now[0])["cpu"].rounds) == 3
    barred = replace(case, bars=(timing.RatioBar("speed", "reference", "cpu", 0.97),))
    assert len(timing.run_case(barred, budget_s=0.1, clock=lambda: now[0])["cpu"].rounds) == 7
    assert timed["cpu"].best_s == 1.0
    floors = machine.Machine("", (), 1, 1, "", 1e9, 2.0, 1e9, 1e9)
    ratio = timing.RatioBar("speed", "reference", "cpu", 3.0, "at least").claim("case", timed, floors)
    assert (ratio.value, ratio.holds) == (4.0, True)
    added = timing.AddedBar("reference", "cpu", 1e9, 1.6, 2.0).claim("case", timed, floors)
    assert (added.value, added.bar, added.holds) == (3000.0, 1602.0, False)


def test_what_adapters_add_is_compared_without_the_base() -> None:
    timed = {"mixed": [12.0, 13.0, 9.9], "one": [11.0, 12.0, 11.0], "base": [10.0, 11.0, 10.0]}
    rounds = {name: timing.Timed(seconds) for name, seconds in timed.items()}
    bar = timing.RatioBar("added speed", "one", "mixed", 0.97, "at least", without="base")
    floors = machine.Machine("", (), 1, 1, "", 1e9, 2.0, 1e9, 1e9)
    claim = bar.claim("case", rounds, floors)
    assert (claim.value, claim.least, claim.most) == (0.5, 0.5, math.inf), "12/13 of all, and half of what is added"
    assert (claim.needed, claim.holds) == (7, False)


def test_machine_is_measured_small() -> None:
    found = machine.measure(threads=1, read_bytes=1 << 20, gemm_size=64)
    assert found.read_bandwidth > 0
    assert found.gemm == max(found.gemm_bf16, found.gemm_fp32) > 0
    assert found.floor_s(found.read_bandwidth, 0) == pytest.approx(1.0)
    assert found.floor_s(0, 3 * found.gemm) == pytest.approx(3.0)
