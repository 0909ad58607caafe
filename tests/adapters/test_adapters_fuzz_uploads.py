"""No upload makes publishing crash, hang, take more memory than it may, or refuse without saying what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import upload_fuzz
from hypothesis import settings

import graftwork_adapters
from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.publish_job import Limits, PublishJob, encode_job

PROCESSES = 4
INPUTS = 500
"""For each process in the quick profile; the full one tries `FULL_INPUTS` each, more than 100,000 in all."""

FULL_INPUTS = 26_000
MEMORY_BYTES = 700 << 20
"""Of data, numpy and its thread's stack included: some hundred times what the largest of these uploads has."""


@pytest.fixture(scope="module")
def corpus(make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sound uploads, one of each kind that is read in another way."""
    folder = tmp_path_factory.mktemp("corpus")
    make_adapter(folder / "plain", target_modules=["q_proj", "down_proj"])
    make_adapter(folder / "patterns", rank_pattern={"q_proj": 2}, alpha_pattern={r"layers\.1\..*": 3}, use_rslora=True)
    make_adapter(folder / "dora", use_dora=True, target_modules=["q_proj", "embed_tokens", "lm_head"])
    make_adapter(folder / "wholes", modules_to_save=["lm_head", "norm", "up_proj"], target_modules=["k_proj"])
    make_adapter(folder / "tokens", trainable_token_indices={"embed_tokens": [3, 1], "lm_head": [5]}, target_modules=["k_proj"])
    make_adapter(folder / "activated", alora_invocation_tokens=[5, 6], lora_bias=True, target_modules=["k_proj"])
    return folder


@pytest.mark.parametrize("process", range(PROCESSES))
def test_broken_uploads_are_refused_with_a_field_or_served(
    process: int, corpus: Path, tiny_spec: BaseSpec, tiny_base_dir: Path, tmp_path: Path
) -> None:
    count = FULL_INPUTS if settings().max_examples > 100 else INPUTS
    limits = Limits(max_upload_bytes=1 << 20, max_header_bytes=1 << 16, max_config_bytes=1 << 14, pattern_seconds=0.5)
    job = PublishJob(tmp_path, tmp_path / "out", tiny_spec, "bfloat16", limits, base_dir=tiny_base_dir)
    (tmp_path / "job").write_bytes(encode_job(job))
    arguments = [str(tmp_path / "job"), str(corpus), str(process * FULL_INPUTS), str(count), str(MEMORY_BYTES)]
    rooms = os.pathsep.join(str(Path(module.__file__ or "").resolve().parents[up]) for module, up in ((graftwork_adapters, 1),))
    done = subprocess.run(
        [sys.executable, upload_fuzz.__file__, *arguments],
        env={"PYTHONPATH": rooms, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    came = json.loads(done.stdout)["came"]
    assert came["accepted"] + came["refused"] == count
    # It must reach behind the first check, and leave some whole.
    assert came["accepted"] > count // 100
    assert {"check files", "check header", "check config", "check tensors", "check shapes"} <= came.keys()
