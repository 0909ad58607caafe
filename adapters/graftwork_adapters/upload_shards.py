"""The weight files of an upload, one or several, as one list of tensors. Reads headers and the index, never values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graftwork_adapters.errors import InvalidSafetensors
from graftwork_adapters.publish_job import Limits
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import SafetensorsHeader, TensorEntry, read_header, shown
from graftwork_adapters.upload_files import INDEX_FILE, UploadFiles
from graftwork_adapters.upload_json import read_json_object

_FIX = "upload the file again, or save the adapter again with PEFT"
_INDEX_FIX = "upload the shards and the index that were saved together, or save the adapter as one file"


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor as it was sent: in which file, and what the file's header says of it."""

    path: Path
    entry: TensorEntry

    @property
    def name(self) -> str:
        """The name that it has in its file."""
        return self.entry.name


def read_shards(upload_dir: Path, files: UploadFiles, limits: Limits, report: Report) -> tuple[SentTensor, ...] | None:
    """All tensors in name order; None after a finding that some file cannot be read, or that the files do not fit each other."""
    headers: dict[str, SafetensorsHeader] = {}
    header_bytes = limits.max_header_bytes  # of all files together
    for name in files.weights:
        try:
            headers[name] = read_header(upload_dir / name, header_bytes)
            header_bytes -= min((entry.start for entry in headers[name].tensors), default=0)
        except InvalidSafetensors as error:
            problems = [(f"{name}: {tensor}" if tensor else name, what) for tensor, what in error.problems]
            report.fail_each("header", problems, _FIX)
    if not headers or len(headers) != len(files.weights):
        return None
    if files.has_index and not _check_index(upload_dir / INDEX_FILE, headers, limits, report):
        return None
    sent = [SentTensor(upload_dir / name, entry) for name, header in headers.items() for entry in header.tensors]
    sent.sort(key=lambda tensor: tensor.name)
    files_read = files.weights[0] if len(headers) == 1 else f"{len(headers)} files"
    report.passed("header", f"{len(sent)} tensors cover {'the file' if len(headers) == 1 else 'the files'} exactly", files_read)
    return tuple(sent)


def _check_index(path: Path, headers: Mapping[str, SafetensorsHeader], limits: Limits, report: Report) -> bool:
    """True if the index names exactly these files and says of each tensor where it lies."""
    raw = read_json_object(path, report, "header", limits.max_header_bytes)
    if raw is None:
        return False
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        report.fail("header", f"{path.name}: weight_map", "is not an object that names a file for each tensor", _INDEX_FIX)
        return False
    named = set(weight_map.values())
    problems: list[tuple[str | None, str]] = []
    problems += [(shown(shard), f"is missing; {path.name} says that it holds tensors") for shard in sorted(named - headers.keys())]
    problems += [(shard, f"is there, but {path.name} does not name it") for shard in sorted(headers.keys() - named)]
    if not problems:
        counted, other = f"-of-{len(headers):05}.safetensors", f"is one of another number of files than {len(headers)}"
        problems += [(shard, other) for shard in headers if not shard.endswith(counted)]
    if not problems:
        problems = _misplaced(weight_map, headers)
    report.fail_each("header", problems, _INDEX_FIX)
    return not problems


def _misplaced(weight_map: Mapping[str, str], headers: Mapping[str, SafetensorsHeader]) -> list[tuple[str | None, str]]:
    problems: list[tuple[str | None, str]] = []
    seen: dict[str, str] = {}
    for shard, header in headers.items():
        for entry in header.tensors:
            said = weight_map.get(entry.name)
            if entry.name in seen:
                problems.append((shown(entry.name), f"lies in {shard} and in {seen[entry.name]}"))
            elif said != shard:
                where = "does not name it" if said is None else f"says {shown(said)}"
                problems.append((shown(entry.name), f"lies in {shard}; {INDEX_FILE} {where}"))
            seen[entry.name] = shard
    missing = sorted(weight_map.keys() - seen.keys())
    problems += [(shown(name), f"is missing; {INDEX_FILE} says that it lies in {shown(weight_map[name])}") for name in missing]
    return problems
