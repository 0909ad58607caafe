"""The publishing process: its verdict, its limits, and that nothing an upload does to it reaches the caller as an exception."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

import graftwork_adapters
from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.packed import read_packed
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import (
    Limits,
    PublishJob,
    PublishResult,
    decode_job,
    decode_result,
    encode_job,
    encode_result,
)
from graftwork_adapters.publisher import run_publish


@pytest.fixture
def job(upload: Path, tmp_path: Path, tiny_base_dir: Path, tiny_spec: BaseSpec) -> PublishJob:
    limits = Limits(max_rank=32, pattern_seconds=1000.0)  # so that `make_slow` is for the process's own limits to end
    return PublishJob(upload, tmp_path / "out.safetensors", tiny_spec, "bfloat16", limits, base_dir=tiny_base_dir)


def workers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "graftwork_adapters.publish_worker" in child.cmdline()]


def make_slow(upload: Path) -> None:
    """A regular expression that takes years on every module's name."""
    path = upload / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": r"(([a-z0-9_.])*)*!"}))


def failing_message(result: PublishResult) -> str:
    assert not result.ok
    (finding,) = [finding for finding in result.report.findings if finding.result == "fail"]
    assert finding.check == "process"
    return finding.message


def test_jobs_and_results_survive_json(job: PublishJob) -> None:
    assert decode_job(encode_job(job)) == job
    result = publish(job)
    assert decode_result(encode_result(result)) == result


def test_the_verdict_is_that_of_the_same_job_in_this_process(job: PublishJob) -> None:
    result = asyncio.run(run_publish(job))
    assert result.ok
    assert result == publish(job)
    index, _ = read_packed(job.out_path, str(result.packed_key))
    assert index.digest == result.digest
    assert not workers()


def test_a_refusal_comes_back_with_its_findings(job: PublishJob) -> None:
    (job.upload_dir / "adapter_model.safetensors").unlink()
    result = asyncio.run(run_publish(job))
    assert not result.ok
    assert [finding.field for finding in result.report.findings if finding.result == "fail"] == ["adapter_model.safetensors"]
    assert not job.out_path.exists()


def test_a_hang_ends_at_the_timeout(job: PublishJob) -> None:
    make_slow(job.upload_dir)
    job.partial_path.write_bytes(b"half")
    start = time.monotonic()
    assert "ran out of time (2 s)" in failing_message(asyncio.run(run_publish(job, timeout_s=2.0)))
    assert time.monotonic() - start < 60
    assert not job.partial_path.exists()
    assert not workers()


def test_the_process_is_limited_and_knows_no_secrets_and_cancelling_kills_it(
    job: PublishJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_slow(job.upload_dir)
    monkeypatch.setenv("GRAFTWORK_PEPPER", "secret")

    async def scenario() -> None:
        task = asyncio.create_task(run_publish(job, timeout_s=60.0, memory_bytes=3 << 30))
        while not (found := workers()) or found[0].rlimit(psutil.RLIMIT_CORE) != (0, 0):
            await asyncio.sleep(0.02)
        assert found[0].rlimit(psutil.RLIMIT_DATA) == (3 << 30, 3 << 30)
        assert found[0].rlimit(psutil.RLIMIT_CPU) == (61, 66)
        assert not any("secret" in value for value in found[0].environ().values())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not workers()

    asyncio.run(scenario())


def test_the_process_dies_with_its_parent(job: PublishJob, tmp_path: Path) -> None:
    make_slow(job.upload_dir)
    (tmp_path / "job.json").write_bytes(encode_job(job))
    code = f"""
import asyncio
from pathlib import Path
from graftwork_adapters.publish_job import decode_job
from graftwork_adapters.publisher import run_publish
asyncio.run(run_publish(decode_job(Path({str(tmp_path / "job.json")!r}).read_bytes())))
"""
    root = str(Path(graftwork_adapters.__file__).parent.parent)
    parent = psutil.Popen([sys.executable, "-c", code], env={"PYTHONPATH": root})
    try:
        while not (children := parent.children()) or children[0].rlimit(psutil.RLIMIT_CORE) != (0, 0):
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_processor_seconds_are_bounded(job: PublishJob) -> None:
    make_slow(job.upload_dir)
    root = str(Path(graftwork_adapters.__file__).parent.parent)
    command = [sys.executable, "-m", "graftwork_adapters.publish_worker", str(1 << 30), "1"]
    done = subprocess.run(command, input=encode_job(job), env={"PYTHONPATH": root}, capture_output=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGXCPU


def test_a_catastrophic_pattern_is_refused_by_name_long_before_the_timeout(job: PublishJob) -> None:
    make_slow(job.upload_dir)
    result = asyncio.run(run_publish(dataclasses.replace(job, limits=Limits()), timeout_s=600.0))
    (finding,) = [finding for finding in result.report.findings if finding.result == "fail"]
    assert (finding.check, finding.field) == ("config", "target_modules")
    assert "more than 3 s of processor time" in finding.message
    assert finding.fix is not None


def test_too_much_memory_is_a_finding(job: PublishJob) -> None:
    rank = 500_000  # its rows are packed in memory
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": np.zeros((rank, 32), np.float32),
        f"{module}.lora_B.weight": np.ones((32, rank), np.float32),
    }
    save_file(tensors, job.upload_dir / "adapter_model.safetensors")
    config = job.upload_dir / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": rank}))
    large = dataclasses.replace(job, limits=Limits(max_rank=rank))
    result = asyncio.run(run_publish(large, memory_bytes=160 << 20))
    assert "ran out of memory (167772160 bytes)" in failing_message(result)


def test_a_crash_is_a_finding(job: PublishJob, tmp_path: Path) -> None:
    unwritable = dataclasses.replace(job, out_path=tmp_path / "no" / "such" / "folder")
    assert "ended unexpectedly (status 1)" in failing_message(asyncio.run(run_publish(unwritable)))
