"""The S3 store's own promises: parts, races, pages, refusals that say what to do. Faults of the network are beside this file."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, SSLError

from graftwork_adapters.errors import StoreError, StoreUnavailable, UnsupportedStore
from graftwork_adapters.s3_client import parse_location
from graftwork_adapters.s3_failures import S3_ERRORS, failure_of
from graftwork_adapters.s3_store import S3Store
from graftwork_adapters.store import StoreConfig
from graftwork_adapters.stores import check_store, open_store

THRESHOLD = PART = 5 << 20  # of the fixtures' limits


def file_of(tmp_path: Path, num_bytes: int) -> Path:
    path = tmp_path / f"source-{num_bytes}"
    path.write_bytes(os.urandom(1 << 16) * (num_bytes >> 16) + os.urandom(num_bytes & 0xFFFF))
    return path


def test_blobs_of_every_size_come_back_as_they_were_put(store, s3, s3_config, unfinished, tmp_path):
    bucket, prefix = parse_location(s3_config.url).bucket, parse_location(s3_config.url).prefix
    sizes = {0: 0, 1: 0, THRESHOLD - 1: 0, THRESHOLD: 0, THRESHOLD + 1: 2, 2 * PART: 2}
    for num_bytes, num_parts in sizes.items():
        source, copy, key = file_of(tmp_path, num_bytes), tmp_path / f"copy-{num_bytes}", f"packed/{num_bytes}"
        assert store.put_if_absent(key, source)
        assert not store.put_if_absent(key, source)
        store.fetch(key, copy)
        assert copy.read_bytes() == source.read_bytes()
        etag = s3.head_object(Bucket=bucket, Key=prefix + key)["ETag"].strip('"')
        assert etag.partition("-")[2] == (str(num_parts) if num_parts else "")
    assert unfinished() == []


@pytest.mark.parametrize(("num_bytes", "max_winners"), [(1000, 1), (THRESHOLD + 1, 8)])  # the server completes parts unguarded
def test_of_eight_writers_of_the_same_bytes_one_is_told_that_it_wrote(store, unfinished, tmp_path, num_bytes, max_winners):
    source = file_of(tmp_path, num_bytes)
    start = threading.Barrier(8)

    def put(_: int) -> bool:
        start.wait()
        return store.put_if_absent("packed/one", source)

    with ThreadPoolExecutor(8) as threads:
        assert 1 <= list(threads.map(put, range(8))).count(True) <= max_winners
    store.fetch("packed/one", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert unfinished() == []


def test_listings_of_many_pages_are_whole_and_in_the_order_of_strings(s3_config, limits, s3, client_of):
    store = S3Store(s3_config, replace(limits, page_size=7), client_of(s3_config.s3_endpoint, limits))
    location = parse_location(s3_config.url)
    keys = [f"uploads/{n}{tail}" for n in range(20) for tail in ("", "/x", "-y")]
    keys = [key for key in keys if f"{key}/x" not in keys]  # a key is no prefix of another
    for key in [*keys, "upload", "uploads", "uploadsx/1"]:
        s3.put_object(Bucket=location.bucket, Key=location.prefix + key, Body=b"")
    assert list(store.list_keys("uploads/")) == sorted(keys)
    assert len(keys) > 5 * 7


def test_what_others_left_below_a_prefix_is_listed_only_if_it_is_a_key(store, s3, s3_config):
    location = parse_location(s3_config.url)
    for name in ("uploads/good", "uploads/folder/", "uploads/.incoming"):
        s3.put_object(Bucket=location.bucket, Key=location.prefix + name, Body=b"")
    assert list(store.list_keys("uploads/")) == ["uploads/.incoming", "uploads/good"]


def test_a_blob_of_another_tool_is_fetched_without_our_checksum(store, s3, s3_config, tmp_path):
    location = parse_location(s3_config.url)
    s3.put_object(Bucket=location.bucket, Key=f"{location.prefix}packed/a", Body=b"theirs", ChecksumAlgorithm="SHA256")
    store.fetch("packed/a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"theirs"


def test_a_store_without_a_prefix_is_the_whole_bucket(s3_config, store, limits, client_of, tmp_path):
    location = parse_location(s3_config.url)
    whole = S3Store(replace(s3_config, url=f"s3://{location.bucket}"), limits, client_of(s3_config.s3_endpoint, limits))
    assert whole.put_if_absent(f"{location.prefix}packed/a", file_of(tmp_path, 3))
    assert store.exists("packed/a")


def refused(config: StoreConfig) -> StoreUnavailable:
    with pytest.raises(StoreUnavailable) as caught:
        check_store(config)
    text = f"{caught.value} {caught.value.fix}"
    assert caught.value.fix
    assert not any(secret in text for secret in ("secret", "AKIA", config.url.removeprefix("s3://"), config.s3_endpoint or "-"))
    return caught.value


def test_checking_a_store_that_is_in_order_changes_nothing(s3_config, store, s3_server, s3):
    check_store(s3_config)
    store.check()
    assert not s3.list_objects_v2(Bucket=s3_server.bucket, Prefix=parse_location(s3_config.url).prefix).get("Contents")


def test_a_wrong_key_is_refused_at_once_and_says_so(s3_config, store, monkeypatch, tmp_path):
    for name, value in (("AWS_SECRET_ACCESS_KEY", "secret"), ("AWS_ACCESS_KEY_ID", "AKIAWRONG")):
        monkeypatch.setenv(name, value)
        found = refused(s3_config)
        assert "refuses the server's credentials" in str(found)
        assert "AWS_SECRET_ACCESS_KEY" in found.fix
    stranger = open_store(s3_config)
    for call in (
        lambda: stranger.put_if_absent("packed/a", file_of(tmp_path, 1)),
        lambda: stranger.fetch("packed/a", tmp_path / "copy"),
        lambda: stranger.exists("packed/a"),
        lambda: list(stranger.list_keys("packed/")),
        lambda: stranger.delete("packed/a"),
    ):
        with pytest.raises(StoreUnavailable):
            call()
    assert not (tmp_path / "copy").exists()
    assert not store.exists("packed/a")


def test_without_a_key_the_next_step_is_to_give_one(s3_config, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert "has no credentials" in str(refused(s3_config))


@pytest.mark.parametrize("missing", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_half_of_a_key_pair_is_told_as_such(s3_config, monkeypatch, tmp_path, missing):
    monkeypatch.delenv(missing)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    found = refused(s3_config)
    assert isinstance(found, StoreUnavailable)
    assert missing in found.fix


def test_a_bucket_that_is_not_there(s3_config, tmp_path):
    config = replace(s3_config, url="s3://no-such-bucket/x")
    assert "bucket is not there" in str(refused(config))
    elsewhere = open_store(config)
    with pytest.raises(StoreUnavailable, match="bucket is not there"):
        elsewhere.put_if_absent("packed/a", file_of(tmp_path, 1))
    with pytest.raises(StoreUnavailable, match="bucket is not there"):
        elsewhere.fetch("packed/a", tmp_path / "copy")


def test_a_server_that_is_not_there_or_speaks_no_tls(s3_config):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        assert "nothing answers" in str(refused(replace(s3_config, s3_endpoint=f"http://{address}")))
    secure = (s3_config.s3_endpoint or "").replace("http://", "https://")
    assert "no TLS connection" in str(refused(replace(s3_config, s3_endpoint=secure)))


def test_each_cause_has_its_own_text_and_next_step():
    def answer(status: int, code: str) -> ClientError:
        return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")  # type: ignore[typeddict-item]

    distrust = ssl.SSLCertVerificationError("CERTIFICATE_VERIFY_FAILED")
    causes = {
        "not trusted": SSLError(endpoint_url="https://host", error=distrust),
        "host name is not known": EndpointConnectionError(endpoint_url="http://host", error=socket.gaierror(-2, "unknown")),
        "clock": answer(403, "RequestTimeTooSkewed"),
        "expired": answer(400, "ExpiredToken"),
        "another region": answer(301, "PermanentRedirect"),
        "does not allow": answer(403, "403"),
        "overloaded": answer(503, "SlowDown"),
        "answers NotImplemented": answer(501, "NotImplemented"),
    }
    for text, error in causes.items():
        assert isinstance(error, S3_ERRORS)
        failure = failure_of(error, "packed/a")
        assert text in str(failure.error)
        assert failure.is_transient == (text in ("overloaded", "host name is not known"))


@pytest.mark.parametrize(
    "config",
    [
        StoreConfig("s3://"),
        StoreConfig("s3:///packed"),
        StoreConfig("s3://AKIAKEY:secret@bucket/x"),
        StoreConfig("s3://bucket:9000/x"),
        StoreConfig("s3://bucket//x"),
        StoreConfig("s3://bucket/a/../b"),
        StoreConfig("s3://bucket/" + "x" * 250),
        StoreConfig("s3://bucket", s3_endpoint="host:9000"),
        StoreConfig("s3://bucket", s3_endpoint="http://AKIAKEY:secret@host"),
        StoreConfig("s3://bucket", s3_endpoint="http://host:99999"),
        StoreConfig("s3://bucket", s3_region="not a region"),
        StoreConfig("s3://bucket", s3_ca_bundle="/no/such/file"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_without_repeating_it(config):
    with pytest.raises(UnsupportedStore) as caught:
        open_store(config)
    assert not any(word in str(caught.value) for word in ("AKIAKEY", "secret", "/no/such"))


LAZY = """
import sys
from graftwork_adapters.store import StoreConfig
from graftwork_adapters.stores import check_store, open_store
open_store(StoreConfig(sys.argv[1])).exists("packed/a")
check_store(StoreConfig(sys.argv[1]))
print(sorted(name for name in sys.modules if name.split(".")[0] in ("boto3", "botocore", "urllib3")))
"""


def test_a_process_with_a_folder_does_not_pay_for_s3(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LAZY, str(tmp_path / "store")]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_checking_a_folder_makes_none(tmp_path):
    with pytest.raises(StoreUnavailable):
        check_store(StoreConfig(str(tmp_path / "absent")))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreError):
        check_store(StoreConfig("http://host/x"))


BESIDE = """
import pathlib, sys
from graftwork_adapters.store import StoreConfig
from graftwork_adapters.stores import open_store
store = open_store(StoreConfig(sys.argv[1], s3_endpoint=sys.argv[2]))
source = pathlib.Path(sys.argv[3])
print(store.put_if_absent("packed/a", source), flush=True)
sys.stdin.read()
sys.exit(7)
"""


def test_a_command_runs_beside_a_server_whose_data_stay(s3_server, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "dev_servers", "s3", "--data-dir", str(tmp_path / "data"), "--"]
    command += [sys.executable, "-c", BESIDE, "s3://{bucket}/x", "{endpoint}", str(file_of(tmp_path, 1000))]
    first = subprocess.run(command, env=environment, input=b"", capture_output=True, timeout=120)
    assert (first.stdout, first.returncode) == (b"True\n", 7), first.stderr
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as second:
        assert second.stdout is not None
        assert second.stdout.readline() == b"False\n"  # the blob outlived the first server
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 128 + signal.SIGTERM
