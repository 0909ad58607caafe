"""Uploads broken at random, and what a process that publishes them may and may not do.

Run as ``python upload_fuzz.py JOB CORPUS SEED COUNT MEMORY_BYTES``: breaks an upload of the corpus for each of COUNT seeds in
one to four ways and publishes it in this process, whose memory is bounded. Writes to standard output what came of them as JSON;
ends with a traceback at the first that raises, takes too long, or is refused by a finding that names no field.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from graftwork_adapters.packed import read_packed
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import PublishJob, PublishResult, decode_job

SECONDS_FOR_ONE = 10.0
"""Processor time; the slowest lawful upload here, one whose patterns spend their budget, takes a third of it."""

Upload = dict[str, bytes]

_NASTY: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 3, 8, 255, 1 << 31, 1 << 62, 1 << 64, -(1 << 63), 0.5, 1e308, -0.0, 1e-320, "", "x",
    "all-linear", "q_proj", "(", ".*", "(a+)+$", "\x00", "\ud800", "é" * 300, "../../etc/passwd", "F32", "I64", "BOOL",
    "pissa", "LORA", [], {}, [[]], [0], [-1], [1, 2, 3], [1 << 62, 1 << 62], ["q_proj"], [None], {"": {}},
    {"a": [1, {"b": None}]}, {"q_proj": 4}, {"lm_head": [0]},
)  # fmt: skip


def break_upload(upload: Upload, random: Random) -> Upload:
    """``upload`` broken in one to four ways."""
    broken = dict(upload)
    for _ in range(random.randint(1, 4)):
        name = random.choice(sorted(broken)) if broken else ""
        ways = _WAYS if name.endswith((".json", ".safetensors")) else _ANY_FILE
        if broken:
            random.choice(ways)(broken, name, random)
    return broken


def _break_json(upload: Upload, name: str, random: Random) -> None:
    """Another value, key or element anywhere in a JSON file or in the header of a safetensors file."""
    data = upload[name]
    head, text, tail = b"", data, b""
    if name.endswith(".safetensors"):
        (length,) = struct.unpack("<Q", data[:8].ljust(8, b"\0"))
        head, text, tail = data[:8], data[8 : 8 + length], data[8 + length :]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _break_bytes(upload, name, random)
    changed = json.dumps(changed_json(value, random)).encode()
    if name.endswith(".safetensors"):
        # Mostly with the length that fits, or nothing behind it would be looked at.
        head = struct.pack("<Q", len(changed)) if random.random() < 0.95 else head
    upload[name] = head + changed + tail
    return None


def changed_json(value: object, random: Random) -> object:
    """``value`` with one change somewhere in it."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(sorted(value))
        way = random.random()
        if way < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if way < 0.2:
            return {(_other_name(k, random) if k == key else k): v for k, v in value.items()}
        if way < 0.25:
            return value | {_other_name(key, random): value[key]}
        if way < 0.4:  # what belongs to another key: sound by itself, wrong in its place
            other = random.choice(sorted(value))
            return value | {key: value[other], other: value[key]}
        return value | {key: changed_json(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.8:
        place = random.randrange(len(value))
        return [*value[:place], changed_json(value[place], random), *value[place + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and random.random() < 0.5:
        return value + random.choice((-1, 1, 2, 4, -4, 64, value))
    return random.choice(_NASTY)


def _other_name(name: str, random: Random) -> str:
    parts = name.split(".")
    place = random.randrange(len(parts))
    parts[place] = random.choice(
        (
            "0",
            "99",
            "-1",
            "",
            "lora_A",
            "lora_B",
            "lora_magnitude_vector",
            "bias",
            "weight",
            "experts",
            "q_proj",
            "lm_head",
            "default",
            "x",
        )
    )
    return ".".join(parts)


def _break_bytes(upload: Upload, name: str, random: Random) -> None:
    """Some bytes changed, inserted or taken out, near the beginning more often than not."""
    data = bytearray(upload[name])
    for _ in range(random.choice((1, 1, 2, 8))):
        end = len(data) if random.random() < 0.4 else min(len(data), 600)
        place = random.randint(0, max(0, end - 1))
        way = random.random()
        if way < 0.5 and data:
            data[place] = random.choice((0, 1, 0x22, 0x2C, 0x7B, 0x7F, 0x80, 0xFF, random.randrange(256)))
        elif way < 0.75:
            data[place:place] = random.randbytes(random.randint(1, 9))
        else:
            del data[place : place + random.randint(1, 9)]
    upload[name] = bytes(data)


def _cut(upload: Upload, name: str, random: Random) -> None:
    upload[name] = upload[name][: random.randint(0, len(upload[name]))]


def _lie_about_length(upload: Upload, name: str, random: Random) -> None:
    length = random.choice((0, 1, 2, 1 << 20, 1 << 40, (1 << 64) - 1, random.randrange(1 << 16)))
    upload[name] = struct.pack("<Q", length) + upload[name][8:]


def _drop_file(upload: Upload, name: str, random: Random) -> None:
    del upload[name]


def _rename_file(upload: Upload, name: str, random: Random) -> None:
    names = (
        "adapter_model.safetensors", "adapter_model.safetensors.index.json", "adapter_model-00001-of-00002.safetensors",
        "adapters.safetensors", "adapter_config.json", "adapter_model.bin", "tokenizer.json", "model.safetensors",
        "x" * 200, "a b.json",
    )  # fmt: skip
    content = upload[name] if random.random() < 0.5 else upload.pop(name)
    upload[random.choice(names)] = content


Way = Callable[[Upload, str, Random], None]
_ANY_FILE: tuple[Way, ...] = (_break_bytes, _cut, _drop_file, _rename_file)
_WAYS: tuple[Way, ...] = (
    _break_json,
    _break_json,
    _break_json,
    _break_json,
    _break_bytes,
    _break_bytes,
    _lie_about_length,
    *_ANY_FILE,
)


class TookTooLong(Exception):
    """One upload used up its processor time."""


def _check(result: PublishResult, job: PublishJob) -> None:
    """What holds for every upload whatever is in it; raises AssertionError."""
    failed = [finding for finding in result.report.findings if finding.result == "fail"]
    nameless = [finding for finding in failed if not finding.field or not finding.message]
    if nameless:
        raise AssertionError(f"findings that name no field: {nameless}")
    if result.ok is bool(failed) or result.ok is not job.out_path.exists() or job.partial_path.exists():
        raise AssertionError(f"the verdict {result.ok} does not go with {failed} and the files there are")
    if result.ok:
        index, rows = read_packed(job.out_path, str(result.packed_key))
        if rows.nbytes != index.num_bytes:
            raise AssertionError("an accepted upload has not the rows that its index says")


def _give_up(*_: object) -> None:
    raise TookTooLong


def main(arguments: list[str]) -> int:
    """See the module."""
    template, corpus = decode_job(Path(arguments[0]).read_bytes()), Path(arguments[1])
    first, count, memory_bytes = map(int, arguments[2:5])
    uploads = [{f.name: f.read_bytes() for f in sorted(folder.iterdir())} for folder in sorted(corpus.iterdir())]
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGVTALRM, _give_up)
    came: Counter[str] = Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory(prefix="upload-fuzz-") as scratch:
        for seed in range(first, first + count):
            random = Random(seed)
            folder = Path(scratch) / "upload"
            folder.mkdir()
            for name, data in break_upload(random.choice(uploads), random).items():
                (folder / name).write_bytes(data)
            job = dataclasses.replace(template, upload_dir=folder, out_path=Path(scratch) / "packed")
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS_FOR_ONE)
            try:
                result = publish(job)
                slowest = max(slowest, SECONDS_FOR_ONE - signal.setitimer(signal.ITIMER_VIRTUAL, 0)[0])
                _check(result, job)
            except BaseException:
                print(f"seed {seed}", file=sys.stderr)
                raise
            came["accepted" if result.ok else "refused"] += 1
            came.update({f"check {finding.check}" for finding in result.report.findings if finding.result == "fail"})
            shutil.rmtree(folder)
            job.out_path.unlink(missing_ok=True)
    print(json.dumps({"came": came, "slowest_s": slowest}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
