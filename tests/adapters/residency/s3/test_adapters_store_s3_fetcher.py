"""Packed adapters from a real S3 server to the disk cache: one request a key, and nothing half-downloaded is ever kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from graftwork_adapters.errors import StoreUnavailable
from graftwork_adapters.fetcher import Fetcher
from graftwork_adapters.keys import packed_path
from graftwork_adapters.packed import write_packed

GENEROUS = 1 << 30


@pytest.fixture
def packed(packed_of, store, tmp_path):
    packed = packed_of("one", num_bytes=1 << 20)
    write_packed(tmp_path / "packed", packed.index, packed.rows)
    store.put_if_absent(packed_path(packed.key), tmp_path / "packed")
    return packed


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_fifty_fetches_of_one_key_make_one_request(packed, through, proxy, tmp_path):
    """dynamo#5184, vllm#20636: parallel loads of one adapter collided."""
    fetcher = Fetcher(through(), tmp_path / "cache", GENEROUS)
    start = threading.Barrier(50)

    def load(_):
        start.wait()
        return fetcher.read(fetcher.fetch(packed.key))

    with ThreadPoolExecutor(50) as threads:
        adapters = list(threads.map(load, range(50)))
    assert proxy.methods() == ["GET"]
    assert all(np.array_equal(adapter.rows, packed.rows) for adapter in adapters)
    assert len(files(tmp_path / "cache")) == 1


def test_a_download_that_is_cut_never_becomes_a_cache_entry(packed, through, proxy, fault, tmp_path):
    """lorax#210: a partial download was used for ever."""
    fetcher = Fetcher(through(), tmp_path / "cache", GENEROUS)
    proxy.faults = [fault("cut", at=500_000), fault(503, times=1 << 30)]
    with pytest.raises(StoreUnavailable):
        fetcher.fetch(packed.key)
    assert files(tmp_path / "cache") == []
    proxy.faults = []
    assert np.array_equal(fetcher.read(fetcher.fetch(packed.key)).rows, packed.rows)


DOWNLOADER = """
import pathlib, sys
from graftwork_adapters.fetcher import Fetcher
from graftwork_adapters.store import StoreConfig
from graftwork_adapters.stores import open_store
store = open_store(StoreConfig(sys.argv[1], s3_endpoint=sys.argv[2]))
Fetcher(store, pathlib.Path(sys.argv[3]), 1 << 30).fetch(sys.argv[4])
"""


def test_a_process_killed_in_the_middle_of_a_download_leaves_nothing_that_is_used(
    packed, s3_config, through, proxy, fault, tmp_path
):
    """lorax#210: kill -9, then another start on the same folder."""
    cache = tmp_path / "cache"
    proxy.faults = [fault("hang", "GET", at=500_000)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", DOWNLOADER, s3_config.url, proxy.endpoint, str(cache), packed.key]
    with subprocess.Popen(command, env=environment) as process:
        while not any(file.stat().st_size for file in files(cache)):
            assert process.poll() is None
        process.kill()
    assert len(files(cache)) == 1
    fetcher = Fetcher(through(), cache, GENEROUS)
    assert files(cache) == []
    assert fetcher.disk_bytes == 0
    assert np.array_equal(fetcher.read(fetcher.fetch(packed.key)).rows, packed.rows)
