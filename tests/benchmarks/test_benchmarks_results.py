"""Medians, ratios, bars, tables and charts: the arithmetic between readings and what is printed."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import charts
import machine
import report
import timing
from results import BenchmarkFailed, Claim, Report, amount, median, paired_ratios, percentile, show


@pytest.mark.parametrize(
    ("value", "bar", "direction", "holds"),
    [
        (1.0, 1.0, "at least", True),
        (0.99, 1.0, "at least", False),
        (1.0, 1.0, "at most", True),
        (1.01, 1.0, "at most", False),
        (math.nan, 1.0, "at least", False),
        (math.nan, 1.0, "at most", False),
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
    claims = [Claim.of("8 streams <base>", "vLLM & others", [3.0], "×", 1.5), Claim("row", "", math.nan, "ms", 0.0, 1.0, 2.0)]
    return Report(benchmark, dict(FACTS), claims, [reading, other])


def test_report_comes_back_from_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "folder" / "out.json"
    show(result(), as_json=True, out=path)
    printed = capsys.readouterr().out
    assert printed.strip() == path.read_text().strip()
    assert [claim["holds"] for claim in json.loads(printed)["claims"]] == [True, False]
    back = Report.read(path)
    assert back.claims[0] == result().claims[0]
    assert math.isnan(back.claims[1].value)
    assert (back.machine, back.readings) == (result().machine, result().readings)


def test_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    show(result(), as_json=False, out=None)
    printed = capsys.readouterr().out
    assert "at least 1.50 ×" in printed
    assert "yes" in printed


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"benchmark": "x", "machine": {}, "claims": [{}], "readings": []}'])
def test_what_is_no_result_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(BenchmarkFailed, match=r"bad\.json is no result"):
        Report.read(tmp_path / "bad.json")
    with pytest.raises(BenchmarkFailed, match=r"missing\.json"):
        Report.read(tmp_path / "missing.json")


def test_page_is_made_of_results_and_can_be_made_again(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    kernels = Report("kernels", dict(FACTS), [], [{"case": "norms", "candidate": "cpu", "roofline": 0.5}])
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
        assert "reads 20.0 GB/s" in text
    for name in (report.THROUGHPUT, report.ROOFLINE):
        assert text.count(f"({name})") == 1
        ElementTree.fromstring((tmp_path / name).read_text())


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
    timed = timing.run_case(case, budget_s=10.0, clock=lambda: now[0])
    assert order == ["cpu", "reference"] * 5, "one round to warm up, then rounds of 5 s until 20 s are used up"
    assert timed["cpu"].best_s == 1.0
    floors = machine.Machine("", (), 1, 1, "", 1e9, 2.0, 1e9, 1e9)
    ratio = timing.RatioBar("speed", "reference", "cpu", 3.0, "at least").claim("case", timed, floors)
    assert (ratio.value, ratio.holds) == (4.0, True)
    added = timing.AddedBar("reference", "cpu", 1e9, 1.6, 2.0).claim("case", timed, floors)
    assert (added.value, added.bar, added.holds) == (3000.0, 1602.0, False)


def test_machine_is_measured_small() -> None:
    found = machine.measure(threads=1, read_bytes=1 << 20, gemm_size=64)
    assert found.read_bandwidth > 0
    assert found.gemm == max(found.gemm_bf16, found.gemm_fp32) > 0
    assert found.floor_s(found.read_bandwidth, 0) == pytest.approx(1.0)
    assert found.floor_s(0, 3 * found.gemm) == pytest.approx(3.0)
