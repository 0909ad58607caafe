"""What an upload may cost the server: processor time for its patterns, and adapter memory once it is served."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.errors import AdapterTooLarge, PatternTooSlow
from graftwork_adapters.pack import longest_row_bytes
from graftwork_adapters.packed import read_index
from graftwork_adapters.pattern_budget import Pattern, PatternBudget
from graftwork_adapters.peft_config import read_peft_config
from graftwork_adapters.publish import publish, validate
from graftwork_adapters.publish_job import Limits, PublishJob, ServingMemory
from graftwork_adapters.report import Finding, Report

CATASTROPHIC = r"(([a-z0-9_.]+)+)+Z$"
MODULE = "model.layers.0.self_attn.q_proj"
ENDLESS = Pattern("target_modules", CATASTROPHIC)


def edit_config(upload: Path, **fields: object) -> None:
    path = upload / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def failures(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.result == "fail"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"target_modules": CATASTROPHIC}, "target_modules"),
        ({"exclude_modules": CATASTROPHIC}, "exclude_modules"),
        ({"rank_pattern": {"k_proj": 4, CATASTROPHIC: 4}}, f"rank_pattern[{CATASTROPHIC}]"),
        ({"alpha_pattern": {CATASTROPHIC: 4}}, f"alpha_pattern[{CATASTROPHIC}]"),
        ({"layers_to_transform": [0, 1], "layers_pattern": ["h", CATASTROPHIC]}, f"layers_pattern[{CATASTROPHIC}]"),
    ],
)
def test_a_catastrophic_pattern_is_a_finding_on_its_field(
    upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec, fields: dict[str, object], named: str
) -> None:
    edit_config(upload, **fields)
    began = time.process_time()
    (finding,) = failures(validate(upload, tiny_base_dir, tiny_spec, Limits(pattern_seconds=0.3)).report)
    assert time.process_time() - began < 3.0
    assert (finding.check, finding.field) == ("config", named)
    assert "more than 0.3 s of processor time" in finding.message
    assert "list the modules by name" in (finding.fix or "")


def test_the_tensors_are_still_checked_and_each_fault_is_named_once(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    edit_config(upload, alpha_pattern={CATASTROPHIC: 4})
    fields = [
        finding.field
        for finding in failures(validate(upload, tiny_base_dir, tiny_spec, Limits(max_rank=2, pattern_seconds=0.2)).report)
    ]
    assert len(fields) == 14  # the rank of every pair is too large, so no pattern is asked: these alone
    edit_config(upload, exclude_modules=CATASTROPHIC)
    fields = [
        finding.field
        for finding in failures(validate(upload, tiny_base_dir, tiny_spec, Limits(max_rank=2, pattern_seconds=0.2)).report)
    ]
    assert len(fields) == 15
    assert fields.count("exclude_modules") == 1


def test_compiling_very_many_patterns_is_within_the_budget_too(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    edit_config(upload, rank_pattern={f"layer{i}[a-z]+": 4 for i in range(20_000)})
    began = time.process_time()
    (finding,) = failures(validate(upload, tiny_base_dir, tiny_spec, Limits(pattern_seconds=0.2)).report)
    assert time.process_time() - began < 3.0
    assert (finding.field or "").startswith("rank_pattern[layer")


def test_very_many_listed_names_cost_nothing(upload: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> None:
    names = [f"m{i}" for i in range(40_000)]
    edit_config(upload, exclude_modules=names, layers_to_transform=list(range(50_000)))
    began = time.process_time()
    assert validate(upload, tiny_base_dir, tiny_spec, Limits()).report.ok
    assert time.process_time() - began < 2.0
    edit_config(upload, exclude_modules=None, modules_to_save=[*names[:20_000], *(f"layers.{i}.mlp.gate" for i in range(20_000))])
    began = time.process_time()
    assert validate(upload, tiny_base_dir, tiny_spec, Limits()).report.ok
    assert time.process_time() - began < 2.0


def test_names_of_what_is_saved_whole_are_matched_as_peft_matches_them(upload: Path) -> None:
    """As its expression `(^|.*[.])name($|[.].*)` does."""
    raw = json.loads((upload / "adapter_config.json").read_text())
    modules = ["model.layers.0.self_attn.q_proj", "model.layers.10.self_attn.o_proj", "lm_head", "model.embed_tokens"]
    names = ["self_attn", "layers.0", "0.self_attn", "attn", "q_proj", "model", "head", "lm_head", "layers.1", "model.embed_tokens"]
    names += ["q_proj.x", "layers.0.self_attn.q_proj", "self_attn|lm_head", r"layers\.1.*", "", ".q_proj", "embed_tokens."]
    for name in names:
        report = Report()
        config = read_peft_config(raw | {"modules_to_save": [name], "target_modules": r".*"}, report, 3.0)
        assert config is not None, report
        for module in modules:
            assert config.selects(module) == (re.match(rf"(^|.*\.){name}($|\..*)", module) is None), (name, module)
            parts = module.split(".")
            around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
            assert config.saves(module) == any(path.endswith(name) for path in around), (name, module)


def test_the_budget_is_one_for_all_patterns_and_stays_spent() -> None:
    budget = PatternBudget(0.1)
    with pytest.raises(PatternTooSlow, match="in target_modules"):
        budget.first_match([ENDLESS], MODULE)
    with pytest.raises(PatternTooSlow, match="in exclude_modules"):
        budget.first_match([Pattern("exclude_modules", "x")], MODULE)


def test_the_timer_leaves_signals_as_they_were() -> None:
    def handler(*_: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGVTALRM, handler)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000.0)
    try:
        with pytest.raises(PatternTooSlow):
            PatternBudget(0.05).first_match([ENDLESS], MODULE)
        assert signal.getsignal(signal.SIGVTALRM) is handler
        assert 900 < signal.getitimer(signal.ITIMER_VIRTUAL)[0] < 1001  # the kernel rounds it up by a tick
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_in_another_thread_the_budget_ends_between_patterns() -> None:
    budget = PatternBudget(0.01)
    costly = Pattern("exclude_modules", CATASTROPHIC)  # on few letters it ends, and takes its time
    matched: list[bool] = []
    ended_in: list[str] = []

    def work() -> None:
        matched.append(budget.first_match([Pattern("target_modules", ".*q_proj")], MODULE) is not None)
        try:
            for _ in range(100_000):
                budget.first_match([costly], MODULE[:7])
        except PatternTooSlow as error:
            ended_in.append(error.field)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (matched, ended_in) == ([True], ["exclude_modules"])


@pytest.fixture
def job(upload: Path, tmp_path: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> PublishJob:
    return PublishJob(upload, tmp_path / "out.safetensors", tiny_spec, "bfloat16", base_dir=tiny_base_dir)


def with_memory(job: PublishJob, memory: ServingMemory) -> PublishJob:
    return dataclasses.replace(job, limits=Limits(memory=memory))


@pytest.mark.parametrize("page_bytes", [64, 200, 1024, 4096])
def test_publishing_refuses_exactly_what_the_device_pool_would(job: PublishJob, tiny_spec: BaseSpec, page_bytes: int) -> None:
    key = str(publish(job).packed_key)
    index = read_index(job.out_path, key)
    verdicts = set()
    for pool_bytes in range(0, 2 * index.num_bytes + 4 * page_bytes, 700):
        pool = DevicePool(pool_bytes, len(tiny_spec.sites), longest_row_bytes(tiny_spec), page_bytes=page_bytes)
        try:
            pool.plan(index)
            fits = True
        except AdapterTooLarge:
            fits = False
        assert publish(with_memory(job, ServingMemory(pool_bytes, page_bytes, 1 << 30))).ok == fits, pool_bytes
        verdicts.add(fits)
    assert verdicts == {True, False}


def test_an_adapter_too_large_for_the_pool_is_refused_with_both_numbers(job: PublishJob) -> None:
    num_bytes = publish(job).num_bytes
    job.out_path.unlink()
    result = publish(with_memory(job, ServingMemory(pool_bytes=2048, page_bytes=1024, host_bytes=1 << 30)))
    (finding,) = failures(result.report)
    pages = -(-num_bytes // 1024)
    assert (result.ok, finding.check) == (False, "memory")
    assert finding.message == f"it needs {pages * 1024} bytes in {pages} pages of adapter memory, there are 2048"
    assert "--adapter-memory" in (finding.fix or "")
    assert not job.out_path.exists()


def test_an_adapter_too_large_for_host_memory_is_refused_with_both_numbers(job: PublishJob) -> None:
    num_bytes = publish(job).num_bytes
    (finding,) = failures(publish(with_memory(job, ServingMemory(1 << 20, 1024, num_bytes - 1))).report)
    assert finding.check == "memory"
    assert finding.message == f"it needs {num_bytes} bytes of host memory, adapters may use {num_bytes - 1}"
    assert "--adapter-host-memory" in (finding.fix or "")
    assert publish(with_memory(job, ServingMemory(1 << 20, 1024, num_bytes))).ok
