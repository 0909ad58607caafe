"""What 8-bit rows cost is measured on the running engine when a version is published, and is in its report."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork_adapters.keys import AdapterDigest, PackedKey, packed_key, packed_path
from graftwork_engine.errors import EngineUnavailable, ErrorCode, RequestFailed
from graftwork_engine.messages import OutItem, TokenLogprob
from graftwork_engine.streams import GenerationRequest
from graftwork_platform.catalog.facts import OwnText
from graftwork_platform.publishing.quality import Agreement, NotMeasured, Quality, divergence

StartAdmin = Callable[..., AbstractContextManager[Any]]

sqlite_only = pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)


@dataclass
class Measure:
    """Stands in for the engine's side; remembers what it was asked, and whether both forms were in the store by then."""

    found: Agreement | Exception = field(default_factory=lambda: Agreement(1e-4, 0.99, 200))
    prompts: list[Any] = field(default_factory=list)
    calls: list[tuple[PackedKey, PackedKey, int | None]] = field(default_factory=list)
    store: Any = None
    were_there: list[bool] = field(default_factory=list)

    async def __call__(
        self, key: PackedKey, reference: PackedKey, vocab_size: int | None, prompts: Sequence[list[int]] | None
    ) -> Agreement:
        self.prompts.append(prompts)
        self.calls.append((key, reference, vocab_size))
        if self.store is not None:
            self.were_there += [self.store.exists(packed_path(each)) for each in (key, reference)]
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def publish(admin: Any, tenant: str, adapter_dtype: str | None, weights: bytes = b"weights") -> Any:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": weights}
    upload = admin.start_upload(tenant, files, **({"adapter_dtype": adapter_dtype} if adapter_dtype else {})).json()
    admin.send_parts(tenant, upload, files)
    admin.call("POST", f"/tenants/{tenant}/uploads/{upload['id']}/complete")
    return admin.wait(tenant, upload["id"])["version"]


def finding_of(version: Any) -> Any:
    found = [finding for finding in version["report"] if finding["check"] == "quantised"]
    return found[0] if found else None


def has_packed(admin: Any, digest: str, row_type: Any) -> bool:
    return bool(admin.services.store.exists(packed_path(packed_key(AdapterDigest(digest), admin.services.spec.base_id, row_type))))


@sqlite_only
@pytest.mark.parametrize("row_type", ["int8", "e4m3"])
def test_the_report_has_the_figures_and_the_comparison_is_dropped(start_admin: StartAdmin, row_type: str) -> None:
    measure = Measure()
    with start_admin(measure=measure) as admin:
        measure.store = admin.services.store
        version = publish(admin, admin.tenant(), row_type)
        assert version["state"] == "ready"
        found = finding_of(version)
        assert found["result"] == "pass"
        assert "1.0e-04" in found["message"]
        assert "99.0% of 200" in found["message"]
        digest = AdapterDigest(version["digest"])
        wanted = [packed_key(digest, admin.services.spec.base_id, kind) for kind in (row_type, "bfloat16")]  # type: ignore[arg-type]
        assert measure.calls == [(wanted[0], wanted[1], None)]
        assert measure.were_there == [True, True]
        assert has_packed(admin, digest, row_type)
        assert not has_packed(admin, digest, "bfloat16")


@sqlite_only
def test_a_form_that_another_version_has_stays(start_admin: StartAdmin) -> None:
    with start_admin(measure=Measure()) as admin:
        tenant = admin.tenant()
        publish(admin, tenant, None)
        version = publish(admin, tenant, "int8")
        assert has_packed(admin, version["digest"], "bfloat16")


@sqlite_only
def test_a_server_in_fp32_compares_with_that(start_admin: StartAdmin) -> None:
    measure = Measure()
    with start_admin(measure=measure, dtype="float32", row_type="int8") as admin:
        version = publish(admin, admin.tenant(), None)
        assert "against float32" in finding_of(version)["message"]
        assert [job.row_type for job in admin.publish.jobs] == ["int8", "float32"]
        assert not has_packed(admin, version["digest"], "float32")


@sqlite_only
def test_what_costs_much_is_a_warning(start_admin: StartAdmin) -> None:
    with start_admin(measure=Measure(Agreement(0.02, 0.9, 100))) as admin:
        version = publish(admin, admin.tenant(), "int8")
        assert version["state"] == "ready"
        assert finding_of(version)["result"] == "warn"
        assert "bfloat16" in finding_of(version)["fix"]


@sqlite_only
@pytest.mark.parametrize("measure", [None, Measure(NotMeasured("the engine did not answer within 60 s"))])
def test_without_an_engine_the_report_says_that_nobody_knows(start_admin: StartAdmin, measure: Measure | None) -> None:
    with start_admin(measure=measure) as admin:
        version = publish(admin, admin.tenant(), "e4m3")
        assert version["state"] == "ready"
        assert finding_of(version)["result"] == "warn"
        assert "could not be measured" in finding_of(version)["message"]
        assert not has_packed(admin, version["digest"], "bfloat16")


@sqlite_only
def test_an_adapter_with_a_tokenizer_of_its_own_is_compared_on_its_own_tokens(start_admin: StartAdmin) -> None:
    measure = Measure()
    with start_admin(measure=measure, row_type="int8") as admin:
        tenant = admin.tenant()
        admin.push(tenant)
        admin.check.text, admin.check.prompts = OwnText(tokenizer=True), [[7, 8], [9]]
        admin.push(tenant, b"others", **{"tokenizer.json": b"{}"})
    assert measure.prompts == [None, [[7, 8], [9]]]
    engine = Engine()
    asyncio.run(Quality(engine, [[1, 2, 3], [4, 5]]).compare(PackedKey("ours"), PackedKey("reference"), 11, [[7, 8]]))
    assert {tuple(request.prompt_ids[:2]) for request in engine.requests} == {(7, 8)}


def test_rows_that_are_not_rounded_are_not_measured(start_admin: StartAdmin) -> None:
    measure = Measure()
    with start_admin(measure=measure) as admin:
        for row_type in (None, "bfloat16", "float32"):
            assert finding_of(publish(admin, admin.tenant(f"t-{row_type}".lower()), row_type)) is None
    assert measure.calls == []


# On an engine


class Engine:
    """Scores any prompt: the reference finds each next token with probability 1/2, the other adapter a little less."""

    info, healthy, stats = None, True, {}

    def __init__(self, failure: Exception | None = None, other: float = 0.45, hangs: bool = False) -> None:
        self.failure, self.other, self.hangs = failure, other, hangs
        self.requests: list[GenerationRequest] = []

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Any]:
        if isinstance(self.failure, EngineUnavailable):
            raise self.failure
        yield _Streams(self)


class _Streams:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.items = engine, list[OutItem]()

    async def add(self, request: GenerationRequest) -> None:
        self.engine.requests.append(request)
        likely = math.log(0.5 if request.adapter_key == "reference" else self.engine.other)
        scores: Any = None
        if request.sampling.prompt_logprobs is not None:
            rest = math.log(0.25)
            scores = [None, *(TokenLogprob(likely, (token, 7), (likely, rest)) for token in request.prompt_ids[1:])]
        said = [9] * request.sampling.max_tokens
        self.items.append(OutItem(request.request_id, 0, said[:1], prompt_logprobs=scores))
        self.items.append(OutItem(request.request_id, 1, said[1:], finish="length"))

    def __aiter__(self) -> _Streams:
        return self

    async def __anext__(self) -> OutItem:
        if self.engine.hangs:
            await asyncio.Event().wait()
        if self.engine.failure is not None:
            raise self.engine.failure
        if not self.items:
            raise StopAsyncIteration
        return self.items.pop(0)


def compare(engine: Any, **options: Any) -> Agreement:
    quality = Quality(engine, [[1, 2, 3], [4, 5]], **options)
    return asyncio.run(quality.compare(PackedKey("ours"), PackedKey("reference"), 11))


def test_both_forms_score_the_same_tokens_those_that_the_unrounded_one_says_among_them() -> None:
    engine = Engine()
    found = compare(engine)
    begun, theirs, ours = engine.requests[:2], engine.requests[2:4], engine.requests[4:]
    assert [request.adapter_key for request in engine.requests] == ["reference"] * 4 + ["ours"] * 2
    said = begun[0].sampling.max_tokens
    assert [request.prompt_ids for request in theirs] == [[1, 2, 3] + [9] * said, [4, 5] + [9] * said]
    assert [request.prompt_ids for request in ours] == [request.prompt_ids for request in theirs]
    assert found.num_places == (3 + said - 1) + (2 + said - 1)
    expected = 0.5 * math.log(0.5 / 0.45) + 0.25 * math.log(0.25 / 0.3)
    assert found.divergence == pytest.approx(expected)
    assert found.same_token == 1.0
    assert {request.vocab_size for request in engine.requests} == {11}
    assert {request.sampling.temperature for request in engine.requests} == {0.0}
    assert len({request.request_id for request in engine.requests}) == 6
    assert len({request.cache_salt for request in engine.requests}) == 3, "none of them reads what another computed"


def test_the_same_form_is_no_distance_away() -> None:
    assert compare(Engine(other=0.5)).divergence == 0.0


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Engine(EngineUnavailable("no engine")), "no engine"),
        (Engine(RequestFailed(ErrorCode.ADAPTER_MISSING, "no packed form")), "no packed form"),
        (Engine(hangs=True), "within 0.05 s"),
    ],
)
def test_an_engine_that_does_not_answer_is_told(engine: Engine, words: str) -> None:
    with pytest.raises(NotMeasured, match=words):
        compare(engine, deadline=0.05 if engine.hangs else 60.0)


weights = st.lists(st.floats(0.01, 1.0), min_size=3, max_size=12)


@given(weights, weights, st.integers(1, 12))
def test_a_part_of_the_vocabulary_tells_at_most_what_all_of_it_does(one: list[float], other: list[float], top: int) -> None:
    size = min(len(one), len(other))
    p, q = ([weight / sum(each[:size]) for weight in each[:size]] for each in (one, other))
    whole = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    best = [sorted(range(size), key=each.__getitem__, reverse=True)[:top] for each in (p, q)]
    found = divergence({i: math.log(p[i]) for i in best[0]}, {i: math.log(q[i]) for i in best[1]})
    assert 0.0 <= found <= whole + 1e-7
