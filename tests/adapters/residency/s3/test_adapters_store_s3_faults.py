"""The S3 store between a broken network and its callers: the right bytes or a clear error, in time, and nothing left behind."""

from __future__ import annotations

import os
import time

import pytest

from graftwork_adapters.errors import BlobCorrupt, BlobNotFound, StoreUnavailable

ALWAYS = 1 << 30
SLACK = 40.0  # seconds that a busy machine may add to a deadline, whose exact place the budget's own tests check
BLOB = os.urandom(300_000)
PLACES = [0, 150_000, -1]  # first, middle, last byte


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(BLOB)
    return path


@pytest.fixture
def large(tmp_path):
    """Two parts, the last of one byte."""
    path = tmp_path / "large"
    path.write_bytes(os.urandom(1 << 20) * 5 + b"x")
    return path


@pytest.fixture
def dest(tmp_path):
    return tmp_path / "dest"


@pytest.fixture
def stored(store, source):
    assert store.put_if_absent("packed/a", source)
    return store


@pytest.mark.parametrize("place", PLACES)
def test_a_fetch_goes_on_where_the_body_was_cut(stored, through, proxy, fault, dest, place):
    """runai-model-streamer#170: short reads at the first, middle and last chunk."""
    proxy.faults = [fault("cut", "GET", at=place)]
    through().fetch("packed/a", dest)
    assert dest.read_bytes() == BLOB
    came = place % len(BLOB)
    assert [target for _, target in proxy.requests[1:]] == [f"bytes={came}-" if came else proxy.requests[0][1]]


def test_a_fetch_survives_several_faults_of_several_kinds(stored, through, proxy, fault, dest):
    proxy.faults = [fault(503), fault("cut", at=70_000), fault("reset")]
    through().fetch("packed/a", dest)
    assert dest.read_bytes() == BLOB
    assert [target for _, target in proxy.requests[2:]] == ["bytes=70000-", "bytes=70000-"]


@pytest.mark.parametrize("kind", [408, 429, 500, 503, "reset", "lost"])
def test_what_passes_is_tried_again_by_every_call(stored, through, proxy, fault, source, dest, kind):
    store = through()
    calls = [
        lambda: store.put_if_absent("packed/b", source),
        lambda: store.fetch("packed/b", dest),
        lambda: store.exists("packed/b"),
        lambda: list(store.list_keys("packed/")),
        lambda: store.delete("packed/b"),
        lambda: store.exists("packed/b"),
    ]
    answers = []
    for call in calls:
        proxy.faults = [fault(kind)]
        answers.append(call())
        assert proxy.faults[0].times == 0
    assert answers == [True, None, True, ["packed/a", "packed/b"], None, False]
    assert dest.read_bytes() == BLOB


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [503, "reset", "cut"])
def test_what_does_not_pass_is_store_unavailable_and_leaves_no_file(stored, through, proxy, fault, dest, tmp_path, kind, place):
    proxy.faults = [fault("cut", at=place), fault(kind, times=ALWAYS)]
    with pytest.raises(StoreUnavailable) as caught:
        through().fetch("packed/a", dest)
    assert caught.value.fix
    assert len(proxy.requests) == 4  # the attempts of the limits
    assert not dest.exists()
    assert not any(word in str(caught.value) for word in ("graftwork", "127.0.0.1", str(tmp_path)))


@pytest.mark.parametrize("place", PLACES)
def test_a_server_that_falls_silent_is_given_up_by_the_deadline(stored, through, proxy, fault, hasty, dest, place):
    """prime-rl#2230: a load that never answers."""
    proxy.faults = [fault("hang", at=place), fault("hang", times=ALWAYS)]
    store = through(hasty)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"does not answer in time|too slow"):
        store.fetch("packed/a", dest)
    assert time.monotonic() - began < hasty.deadline + SLACK
    assert not dest.exists()


def test_a_server_that_accepts_and_never_answers_stops_no_call_for_ever(through, proxy, fault, hasty, source, dest):
    """prime-rl#2230. What the proxy holds back is the whole answer."""
    proxy.faults = [fault("hang", times=ALWAYS, at=0)]
    proxy.mute = True
    store = through(hasty)
    calls = [
        lambda: store.put_if_absent("packed/b", source),
        lambda: store.fetch("packed/b", dest),
        lambda: store.exists("packed/b"),
        lambda: list(store.list_keys("packed/")),
        lambda: store.delete("packed/b"),
        store.check,
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="does not answer in time"):
            call()
        assert time.monotonic() - began < hasty.deadline + SLACK


def test_a_server_that_drips_meets_the_deadline_too(stored, through, proxy, fault, hasty, dest):
    proxy.faults = [fault("drip", times=ALWAYS, at=100)]
    store = through(hasty)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="too slow"):
        store.fetch("packed/a", dest)
    assert time.monotonic() - began < hasty.deadline + SLACK
    assert not dest.exists()


def test_what_is_refused_or_absent_is_asked_once(stored, through, proxy, fault, dest):
    with pytest.raises(BlobNotFound):
        through().fetch("packed/absent", dest)
    proxy.faults = [fault(403, times=ALWAYS)]
    with pytest.raises(StoreUnavailable, match="does not allow"):
        through().fetch("packed/a", dest)
    assert len(proxy.requests) == 2
    assert not dest.exists()


@pytest.mark.parametrize("place", PLACES)
def test_damage_on_the_way_is_found_and_repaired_or_said(stored, through, proxy, fault, dest, place):
    proxy.faults = [fault("damage", at=place)]
    through().fetch("packed/a", dest)
    assert dest.read_bytes() == BLOB
    dest.unlink()
    proxy.faults = [fault("damage", at=place, times=ALWAYS)]
    with pytest.raises(BlobCorrupt):
        through().fetch("packed/a", dest)
    assert not dest.exists()


def test_two_versions_of_a_blob_are_never_mixed(stored, through, proxy, fault, source, dest):
    """The blob is deleted and put again, with other bytes, between the halves of a download."""
    other = os.urandom(len(BLOB))

    class Replacing(fault):
        def strike(self) -> None:
            stored.delete("packed/a")
            source.write_bytes(other)
            stored.put_if_absent("packed/a", source)

    proxy.faults = [Replacing("cut", at=150_000)]
    through().fetch("packed/a", dest)
    assert dest.read_bytes() == other


def test_a_server_that_ignores_ranges_is_read_from_the_start(stored, through, proxy, fault, dest):
    proxy.faults = [fault("cut", at=150_000), fault("whole")]
    through().fetch("packed/a", dest)
    assert dest.read_bytes() == BLOB


def test_a_put_whose_answer_was_lost_knows_its_own_blob(store, through, proxy, fault, source, dest):
    proxy.faults = [fault("lost", "PUT")]
    assert through().put_if_absent("packed/a", source)
    assert proxy.methods() == ["PUT", "PUT", "HEAD"]
    store.fetch("packed/a", dest)
    assert dest.read_bytes() == BLOB


def test_a_put_that_came_too_late_knows_the_blob_is_not_its_own(stored, through, proxy, fault, source):
    """The same bytes, put by someone else before: only one of the two may say that it wrote them."""
    proxy.faults = [fault("reset", "PUT")]
    assert not through().put_if_absent("packed/a", source)


def test_a_conflict_that_is_none_is_tried_again(through, proxy, fault, source, large, unfinished):
    proxy.faults = [fault(409, "PUT")]
    assert through().put_if_absent("packed/a", source)
    proxy.faults = [fault(409, "POST", "uploadId=")]
    assert through().put_if_absent("packed/large", large)
    assert unfinished() == []


PART_REQUESTS = {"uploads": "POST", "partNumber=1": "PUT", "partNumber=2": "PUT", "?uploadId=": "POST"}


@pytest.mark.parametrize("kind", [503, "reset", "lost"])
def test_a_put_in_parts_survives_a_fault_at_each_of_its_requests(
    through, proxy, fault, large, dest, store, unfinished, s3, s3_server, kind
):
    proxied = through()
    for number, (part, method) in enumerate(PART_REQUESTS.items()):
        proxy.faults = [fault(kind, method, part)]
        assert proxied.put_if_absent(f"packed/{number}", large)
        assert proxy.faults[0].times == 0
        store.fetch(f"packed/{number}", dest)
        assert dest.read_bytes() == large.read_bytes()
        dest.unlink()
    # An upload whose name never came back cannot be ended by us; it has no parts, and the bucket's lifecycle rule removes it.
    left = s3.list_multipart_uploads(Bucket=s3_server.bucket).get("Uploads", [])
    assert len(left) == (1 if kind == "lost" else 0)
    for upload in left:
        named = {"Bucket": s3_server.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
        assert upload["Key"].endswith("packed/0")
        assert not s3.list_parts(**named).get("Parts")
        s3.abort_multipart_upload(**named)


@pytest.mark.parametrize("kind", [403, 503, "reset"])
def test_a_put_in_parts_that_fails_leaves_no_parts(through, proxy, fault, large, store, unfinished, kind):
    proxied = through()
    for part, method in PART_REQUESTS.items():
        proxy.faults = [fault(kind, method, part, times=ALWAYS)]
        with pytest.raises(StoreUnavailable):
            proxied.put_if_absent("packed/large", large)
        assert unfinished() == []
        assert not store.exists("packed/large")


def test_a_blob_that_comes_between_the_parts_and_their_completion_stays(
    through, proxy, fault, large, source, store, dest, unfinished
):
    class Overtaken(fault):
        def strike(self) -> None:
            assert store.put_if_absent("packed/a", source)

    proxy.faults = [Overtaken("", "POST", "?uploadId=")]
    assert not through().put_if_absent("packed/a", large)
    store.fetch("packed/a", dest)
    assert dest.read_bytes() == BLOB
    assert unfinished() == []


def test_a_put_that_cannot_send_in_time_is_given_up(through, proxy, fault, hasty, large, unfinished):
    proxy.faults = [fault("hang", "PUT", times=ALWAYS)]
    proxy.mute = True
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        through(hasty).put_if_absent("packed/large", large)
    assert time.monotonic() - began < hasty.deadline + SLACK  # and the removal of the parts
    assert unfinished() == []


def test_bytes_damaged_on_their_way_to_the_server_are_refused_by_it_and_sent_again(through, proxy, fault, source, store, dest):
    proxy.faults = [fault("garble", "PUT")]
    assert through().put_if_absent("packed/a", source)
    assert proxy.methods() == ["PUT", "PUT"]
    store.fetch("packed/a", dest)
    assert dest.read_bytes() == BLOB
