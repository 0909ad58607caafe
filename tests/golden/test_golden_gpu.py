"""The specification on a GPU: captured and called, with adapters that take turns in memory."""

from __future__ import annotations

import pytest

SHORT = [11, 250, 3, 77, 140, 9, 9, 201, 64, 5, 300, 18, 42]
PROMPTS = [SHORT, [7], [(13 * i * i + 5 * i + 1) % 320 for i in range(41)]]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("use_graphs", [True, False])
@pytest.mark.parametrize("kernels", [{}, {"linear": "triton"}, {"linear": "triton_fused"}, {"all": "reference"}])
def test_mixed_batch_of_adapters_and_base(golden, job, start_engine, assert_matches, use_graphs, kernels) -> None:
    jobs = [job(prompt, name, scores_prompt=True) for prompt in PROMPTS for name in (None, *golden.adapters)]
    engine = start_engine(device="cuda", kernels=kernels, use_graphs=use_graphs, prefill_chunk_size=7)
    for request, answer in zip(jobs, engine.run(*jobs), strict=True):
        assert_matches(golden, request, answer)


def test_eviction_preemption_and_reload(golden, job, start_engine, assert_matches) -> None:
    jobs = [job(SHORT, name) for name in (None, *golden.adapters)]
    engine = start_engine(
        device="cuda",
        kernels={},
        adapter_memory_bytes=golden.largest_adapter_bytes * 3 // 2,
        kv_memory_bytes=24 * 4 * golden.kv_bytes_per_token,
        enable_prefix_caching=False,
    )
    for _ in range(3):
        for request, answer in zip(jobs, engine.run(*jobs), strict=True):
            assert_matches(golden, request, answer)
    assert engine.stat("adapter_device_evictions_total") >= len(golden.adapters)
