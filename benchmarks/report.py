"""Puts results of the benchmarks into `docs/performance.md`: one table and two pictures. Measures nothing.

    report.py RESULT.json … [--docs FOLDER] [--json]

Of two results of one benchmark the later on the command line counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from charts import Bar, Group, bar_chart
from results import BenchmarkFailed, Claim, Report, as_text, median

BEGIN, END = "<!-- results -->", "<!-- end of results -->"
ORDER = ("serving", "kernels", "cold_start", "step", "row_types", "api", "cores")
THROUGHPUT, ROOFLINE = "performance-serving.svg", "performance-kernels.svg"


def shown(reports: Mapping[str, Report]) -> list[Claim]:
    """Every claim but the operators' that have no bar: those are in the picture, and in the results themselves."""
    names = [*ORDER, *sorted(set(reports) - set(ORDER))]
    return [
        claim for name in names if name in reports for claim in reports[name].claims if claim.bar is not None or name != "kernels"
    ]


def table(claims: Sequence[Claim]) -> str:
    """In Markdown."""
    lines = ["| measured | against | median | least … most | bar | holds | remarks |", "|---|---|---|---|---|---|---|"]
    for claim in claims:
        *cells, holds = claim.cells
        lines.append(f"| {' | '.join([*cells, '**no**' if holds == 'no' else holds, claim.remarks])} |")
    return "\n".join(lines)


def as_json(reports: Mapping[str, Report]) -> str:
    """What `table` shows, and the machines with the parts that were measured on each."""
    machines = [
        {"benchmark": name, "parts": parts, **facts} for name, report in reports.items() for facts, parts in machines_of(report)
    ]
    return as_text({"claims": [claim.as_json() for claim in shown(reports)], "machines": machines})


def machines_of(report: Report) -> list[tuple[dict[str, Any], list[str]]]:
    """The machine as each run found it, with the parts of that run; those that name none are left out."""
    found: list[tuple[dict[str, Any], list[str]]] = []
    for part in report.parts:
        known = [parts for facts, parts in found if facts == part.machine]
        if known:
            known[0].append(part.name)
        elif part.machine:
            found.append((part.machine, [part.name]))
    return found


def throughput_chart(report: Report) -> str:
    """Median output tokens a second of every server in every row that has several: others may be of another machine."""
    rates: dict[str, dict[str, list[float]]] = {}
    for reading in report.readings:
        label = f"{reading['streams']} stream{'s' if reading['streams'] > 1 else ''}, {reading['mix']}"
        kind = {"": "graftwork", "own": "graftwork"}.get(reading["kind"], str(reading["server"]).partition(",")[0])
        rates.setdefault(label, {}).setdefault(kind, []).append(reading["output_tokens_per_s"])
    groups = [
        Group(label, tuple(Bar(kind, median(values)) for kind, values in of.items())) for label, of in rates.items() if len(of) > 1
    ]
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
    """Replace what stands between the marks of performance.md, which is made if it is missing, and the pictures.

    Raises `BenchmarkFailed`.
    """
    page = docs / "performance.md"
    docs.mkdir(parents=True, exist_ok=True)
    text = page.read_text(encoding="utf-8") if page.exists() else f"# Performance\n\n{BEGIN}\n{END}\n"
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise BenchmarkFailed(f"{page} must have one line {BEGIN} and one {END}; the table goes between them")
    parts = ["", table(shown(reports)), ""]
    if "serving" in reports and reports["serving"].readings:
        (docs / THROUGHPUT).write_text(throughput_chart(reports["serving"]), encoding="utf-8")
        parts += [f"![Output tokens a second of each server]({THROUGHPUT})", ""]
    if "kernels" in reports and any(reading.get("roofline") for reading in reports["kernels"].readings):
        (docs / ROOFLINE).write_text(roofline_chart(reports["kernels"]), encoding="utf-8")
        parts += [f"![Share of the roofline by operator]({ROOFLINE})", ""]
    for name, report in reports.items():
        parts += [f"{name} ({', '.join(of)}): {machine_line(facts)}\n" for facts, of in machines_of(report)]
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(before + BEGIN + "\n".join(parts) + "\n" + END + after, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Write the page; 1 if a result cannot be read."""
    parser = argparse.ArgumentParser(description="Put benchmark results into docs/performance.md.")
    parser.add_argument("results", type=Path, nargs="+", help="files that the benchmarks wrote with --out")
    docs = Path(__file__).resolve().parents[1] / "docs"
    parser.add_argument("--docs", type=Path, default=docs, help="folder of performance.md and its pictures")
    parser.add_argument("--json", action="store_true", help="print the table as JSON too")
    options = parser.parse_args(arguments)
    try:
        reports = {report.benchmark: report for report in map(Report.read, options.results)}
        write(reports, options.docs)
    except (BenchmarkFailed, OSError, ValueError, KeyError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(as_json(reports))
    print(f"{options.docs / 'performance.md'} shows {', '.join(reports)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
