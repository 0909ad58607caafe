"""Packed files broken at random never lead a kernel or the model anywhere but into an adapter's own rows and tensors."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import settings
from upload_fuzz import changed_json

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.errors import AdapterTooLarge, BlobCorrupt
from graftwork_adapters.fetcher import HostAdapter
from graftwork_adapters.pack import longest_row_bytes
from graftwork_adapters.packed import read_packed
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import PublishJob
from graftwork_adapters.whole_checks import weight_sites, whole_shapes
from graftwork_adapters.whole_memory import WholeLimits

INPUTS, FULL_INPUTS = 1500, 30_000


@pytest.fixture(scope="module")
def packed(
    make_adapter: Callable[..., Path], tiny_spec: BaseSpec, tiny_base_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A packed form with rows, scales and wholes, and its key."""
    folder = tmp_path_factory.mktemp("packed")
    upload = make_adapter(
        folder / "upload", use_dora=True, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head", "norm"]
    )
    result = publish(PublishJob(upload, folder / "packed", tiny_spec, "bfloat16", base_dir=tiny_base_dir))
    assert result.packed_key is not None, result.report
    return folder / "packed", result.packed_key


def new_pool(spec: BaseSpec) -> DevicePool:
    wholes = WholeLimits(1 << 20, whole_shapes(spec), weight_sites(spec), torch.bfloat16)
    widths = [(site.in_features, site.out_features) for site in spec.sites]
    return DevicePool(1 << 20, len(spec.sites), longest_row_bytes(spec), page_bytes=1024, max_rank=64, widths=widths, wholes=wholes)


def break_packed(data: bytes, random: Random) -> bytes:
    """The file with bytes changed, or with an index that says something else and has the checksum that goes with it."""
    length = int.from_bytes(data[:8], "little")
    if random.random() < 0.2:
        broken = bytearray(data)
        for _ in range(random.choice((1, 1, 2, 8))):
            broken[random.randrange(len(broken) if random.random() < 0.5 else 8 + length)] = random.randrange(256)
        return bytes(broken)
    header, rows = json.loads(data[8 : 8 + length]), data[8 + length :]
    metadata = header["__metadata__"]
    index = json.loads(metadata["graftwork.index"])
    kept = {name: index[name] for name in ("key", "digest", "base_id", "row_type")}
    for _ in range(random.randint(1, 3)):
        index = changed_json(index, random)
    if isinstance(index, dict) and random.random() < 0.9:
        index |= kept  # or it would be of another adapter, and not looked at any further
    metadata["graftwork.index"] = json.dumps(index)
    metadata["graftwork.index_sha256"] = hashlib.sha256(metadata["graftwork.index"].encode("utf-8", "surrogatepass")).hexdigest()
    if random.random() < 0.3:  # as many rows as it may say now
        rows = rows + bytes(random.choice((64, 1024, 4096))) if random.random() < 0.5 else rows[: random.randrange(len(rows))]
        header["rows"] = {"dtype": "U8", "shape": [len(rows)], "data_offsets": [0, len(rows)]}
        metadata["graftwork.sha256"] = hashlib.sha256(rows).hexdigest()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rows


def test_what_a_broken_packed_file_says_is_refused_or_safe(packed: tuple[Path, str], tiny_spec: BaseSpec, tmp_path: Path) -> None:
    path, key = packed
    whole, pool, came = path.read_bytes(), new_pool(tiny_spec), Counter[str]()
    broken = tmp_path / "broken"
    for seed in range(FULL_INPUTS if settings().max_examples > 100 else INPUTS):
        broken.write_bytes(break_packed(whole, Random(seed)))
        refusal = ""
        try:
            index, rows = read_packed(broken, key)
            came["read"] += 1
            layout = pool.plan(index)
            placement = pool.place(layout.extent)
            assert placement is not None, seed
            try:
                pool.write(placement, layout, HostAdapter(index, rows))
                assert pool.discrepancies({key: placement}, [key]) == [], seed
                came["held"] += 1
            finally:
                pool.free(placement)
                pool.clear([placement.index])
        except (BlobCorrupt, AdapterTooLarge) as error:
            refusal = str(error)
            came["refused"] += 1
        assert not refusal or key in refusal, seed
        assert pool.discrepancies({}, []) == [], seed
    assert came["refused"] > came["held"] > 0
    assert came["read"] > came["held"]  # some get as far as the pool and are refused there
    shutil.copy(path, broken)
    assert pool.plan(read_packed(broken, key)[0]).extent.num_rows > 0
