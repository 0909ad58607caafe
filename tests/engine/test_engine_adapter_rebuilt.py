"""An adapter whose packed form in the store is corrupt fails its requests alone, and serves again once the store has it mended."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_engine import Solo, TinyEngine, TinyModel, make_tiny_model

from graftwork_adapters.keys import packed_path
from graftwork_engine.errors import ErrorCode

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModel:
    return make_tiny_model(tmp_path)


@pytest.mark.parametrize("place", [20, -1], ids=["header", "rows"])
def test_a_rebuilt_adapter_is_fetched_again(tiny: TinyModel, tmp_path: Path, place: int) -> None:
    solo = Solo(tiny, tmp_path / "solo")
    expected = {name: solo(name, PROMPT, 4) for name in ("A", "B")}
    solo.close()
    blob = tiny.store_dir / packed_path(tiny.keys["B"])
    good = blob.read_bytes()
    bad = bytearray(good)
    bad[place] ^= 0xFF
    blob.unlink()
    blob.write_bytes(bad)
    engine = TinyEngine(tiny, tmp_path / "cache")

    failing = [engine.add("B", PROMPT, 4) for _ in range(3)]
    served = engine.add("A", PROMPT, 4)
    engine.finish()
    assert {engine.finished[name] for name in failing} == {ErrorCode.ADAPTER_CORRUPT}
    assert engine.outputs[served] == expected["A"]
    assert [path.stem.split("-")[0] for path in (tmp_path / "cache").rglob("*.safetensors")] == [tiny.keys["A"]]

    blob.write_bytes(good)
    assert engine.run(("B", PROMPT, 4), ("A", PROMPT, 4)) == [expected["B"], expected["A"]]
    engine.close()
