"""JSON files of an upload: small objects from strangers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown


def read_json_object(path: Path, report: Report, check: str, max_bytes: int) -> dict[str, object] | None:
    """The object in ``path``, or None after a finding that there is none."""
    fix = "save the adapter again with save_pretrained"
    size = path.stat().st_size
    if size > max_bytes:
        message = f"has {size} bytes, more than the {max_bytes} allowed"
        report.fail(
            check, path.name, message, "remove fields that are not the adapter's; what trainers write takes a few kilobytes"
        )
        return None
    try:
        raw = json.loads(path.read_bytes(), object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        report.fail(check, path.name, f"is not valid JSON: {shown(str(error))}", fix)
        return None
    if not isinstance(raw, dict):
        report.fail(check, path.name, "is not a JSON object", fix)
        return None
    return raw


def brief(value: object) -> str:
    """A JSON value as a finding may carry it."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "nested too deeply to be shown"
    return shown(text if len(text) <= 80 else f"{text[:77]}...")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        name = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the field {name} appears more than once")
    return result


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
