"""Puts results of the benchmarks into `docs/performance.md`: one table and two pictures. Measures nothing.

    report.py RESULT.json … [--docs FOLDER]

Of two results of one benchmark the later on the command line counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from charts import Bar, Group, bar_chart
from results import BenchmarkFailed, Claim, Report, amount, median

BEGIN, END = "<!-- results -->", "<!-- end of results -->"
ORDER = ("serving", "kernels", "cold_start", "step")
THROUGHPUT, ROOFLINE = "performance-serving.svg", "performance-kernels.svg"


def table(reports: Mapping[str, Report]) -> str:
    """Every claim that has a bar, and serving's others: the rest is in the results themselves."""
    lines = ["| measured | against | median | least … most | bar | holds |", "|---|---|---|---|---|---|"]
    for name in [*ORDER, *sorted(set(reports) - set(ORDER))]:
        if name in reports:
            lines += [_line(claim) for claim in reports[name].claims if claim.bar is not None or name == "serving"]
    return "\n".join(lines)


def _line(claim: Claim) -> str:
    bar = "" if claim.bar is None else f"{claim.direction} {amount(claim.bar, claim.unit)}"
    holds = {None: "", True: "yes", False: "**no**"}[claim.holds]
    spread = f"{amount(claim.least, '')} … {amount(claim.most, '')}"
    return f"| {claim.row} | {claim.against} | {amount(claim.value, claim.unit)} | {spread} | {bar} | {holds} |"


def throughput_chart(report: Report) -> str:
    """Median output tokens a second of every server in every row."""
    rates: dict[str, dict[str, list[float]]] = {}
    for reading in report.readings:
        label = f"{reading['streams']} stream{'s' if reading['streams'] > 1 else ''}, {reading['mix']}"
        kind = {"": "graftwork", "own": "graftwork"}.get(reading["kind"], str(reading["server"]).partition(",")[0])
        rates.setdefault(label, {}).setdefault(kind, []).append(reading["output_tokens_per_s"])
    groups = [Group(label, tuple(Bar(kind, median(values)) for kind, values in of.items())) for label, of in rates.items()]
    return bar_chart("Output tokens a second", "tokens/s", groups)


def roofline_chart(report: Report) -> str:
    """How near each operator comes to what the machine can do, ours and the others'."""
    shares: dict[str, list[Bar]] = {}
    for reading in report.readings:
        if reading.get("roofline"):
            shares.setdefault(reading["case"], []).append(Bar(reading["candidate"], 100 * reading["roofline"]))
    return bar_chart("Share of the roofline, by operator", "%", [Group(case, tuple(bars)) for case, bars in shares.items()])


def machine_line(facts: Mapping[str, Any]) -> str:
    """One sentence on where a result comes from."""
    features = ", ".join(facts.get("features", [])) or "none of the known extensions"
    return (
        f"{facts['processor']}, {facts['cores']} cores, {features}; torch {facts['torch']}; reads {facts['read_gb_s']} GB/s; "
        f"matrix products {facts['gemm_bf16_gflop_s']} GFLOP/s in bf16 and {facts['gemm_fp32_gflop_s']} in fp32."
    )


def write(reports: Mapping[str, Report], docs: Path) -> None:
    """Replace what stands between the marks of docs/performance.md, and the pictures. Raises `BenchmarkFailed`."""
    page = docs / "performance.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise BenchmarkFailed(f"{page} must have one line {BEGIN} and one {END}; the table goes between them")
    parts = ["", table(reports), ""]
    if "serving" in reports and reports["serving"].readings:
        (docs / THROUGHPUT).write_text(throughput_chart(reports["serving"]), encoding="utf-8")
        parts += [f"![Output tokens a second of each server]({THROUGHPUT})", ""]
    if "kernels" in reports and reports["kernels"].readings:
        (docs / ROOFLINE).write_text(roofline_chart(reports["kernels"]), encoding="utf-8")
        parts += [f"![Share of the roofline by operator]({ROOFLINE})", ""]
    parts += [f"{name}: {machine_line(report.machine)}\n" for name, report in reports.items() if "read_gb_s" in report.machine]
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(before + BEGIN + "\n".join(parts) + "\n" + END + after, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Write the page; 1 if a result cannot be read."""
    parser = argparse.ArgumentParser(description="Put benchmark results into docs/performance.md.")
    parser.add_argument("results", type=Path, nargs="+", help="files that the benchmarks wrote with --out")
    parser.add_argument("--docs", type=Path, default=Path(__file__).resolve().parents[1] / "docs")
    options = parser.parse_args(arguments)
    try:
        reports = {report.benchmark: report for report in map(Report.read, options.results)}
        write(reports, options.docs)
    except (BenchmarkFailed, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(f"{options.docs / 'performance.md'} shows {', '.join(reports)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
