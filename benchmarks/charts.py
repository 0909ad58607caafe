"""Bar charts as SVG text, readable on light and dark ground. Knows nothing of what is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LABEL, BAR, GAP, GROUP_GAP, TOP = 760, 300, 16, 3, 14, 64
COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#a855f7", "#ef4444", "#64748b")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2937}.title{font-size:15px;font-weight:600}.faint{fill:#6b7280}"
    "@media(prefers-color-scheme:dark){text{fill:#e5e7eb}.faint{fill:#9ca3af}}"
)


@dataclass(frozen=True)
class Bar:
    """One bar of a group: the series that it belongs to, and its length."""

    series: str
    value: float


@dataclass(frozen=True)
class Group:
    """Bars that are compared."""

    label: str
    bars: tuple[Bar, ...]


def bar_chart(title: str, unit: str, groups: Sequence[Group]) -> str:
    """Horizontal bars from 0, a colour for each series in the order of their first appearance. Raises ValueError for no bars."""
    values = [bar.value for group in groups for bar in group.bars]
    if not values or not all(math.isfinite(value) and value >= 0 for value in values):
        raise ValueError(f"{title}: a chart needs bars of 0 or more")
    series = list(dict.fromkeys(bar.series for group in groups for bar in group.bars))
    scale = (WIDTH - LABEL - 90) / (max(values) or 1.0)
    parts, y = [_legend(series)], float(TOP)
    for group in groups:
        height = len(group.bars) * (BAR + GAP)
        parts.append(_text(LABEL - 10, y + height / 2 + 3, group.label, "end"))
        for bar in group.bars:
            length = max(1.0, bar.value * scale)
            colour = COLOURS[series.index(bar.series) % len(COLOURS)]
            parts.append(f'<rect x="{LABEL}" y="{y:.1f}" width="{length:.1f}" height="{BAR}" rx="2" fill="{colour}"/>')
            parts.append(_text(LABEL + length + 6, y + BAR - 4, f"{_short(bar.value)} {unit}"))
            y += BAR + GAP
        y += GROUP_GAP
    size = f'viewBox="0 0 {WIDTH} {y:.0f}" width="{WIDTH}" height="{y:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}"><style>{STYLE}</style>'
    return "\n".join([head, _text(12, 24, title, kind="title"), *parts, "</svg>", ""])


def _legend(series: Sequence[str]) -> str:
    parts, x = [], 12.0
    for number, name in enumerate(series):
        parts.append(f'<rect x="{x:.0f}" y="38" width="11" height="11" rx="2" fill="{COLOURS[number % len(COLOURS)]}"/>')
        parts.append(_text(x + 16, 48, name, kind="faint"))
        x += 34 + 7.2 * len(name)
    return "\n".join(parts)


def _text(x: float, y: float, content: str, anchor: str = "start", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(content)}</text>'


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
