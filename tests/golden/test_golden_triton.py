"""An engine on the kernels for GPUs, interpreted: in fp32 a request gets what transformers and PEFT give it, as on any others."""

from __future__ import annotations

import pytest

SHORT = [11, 250, 3, 77, 140, 9, 9, 201, 64, 5, 300, 18, 42]
REQUESTS = [(9, None), (3, None), (9, "rank24-pattern"), (4, "rank5-one-layer")]
"""Tokens of a prompt, and whose: the base, ranks on both sides of a tile, and a layer that its adapter leaves to the base."""


@pytest.mark.parametrize("golden", ["llama-tied"], indirect=True)
@pytest.mark.parametrize("kernels", [{"all": "triton"}, {"all": "triton", "linear": "triton_fused"}], ids=["two", "fused"])
def test_a_mixed_batch_in_chunks(golden, job, start_engine, assert_matches, kernels) -> None:
    """Steps of chunks alone, of both chunks and decode rows, and of decode rows alone; few tokens, since a launch takes long."""
    jobs = [job(SHORT[:length], name, max_tokens=2) for length, name in REQUESTS]
    engine = start_engine(device="cpu", kernels=kernels, prefill_chunk_size=5)
    for request, answer in zip(jobs, engine.run(*jobs), strict=True):
        assert_matches(golden, request, answer)
