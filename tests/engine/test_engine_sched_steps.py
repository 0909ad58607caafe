"""The scheduler's plans, rule by rule, with a scripted runner: budget, chunks, order, stops, preemption, prefix cache, limits.

This file is long because each rule is one short trace, and a reader compares them side by side.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from graftwork_engine.errors import ErrorCode, RequestRejected
from graftwork_engine.messages import TokenLogprob
from graftwork_engine.request import RequestStatus
from scripted_engine import VOCAB_SIZE, Bench, solo_output, trace_line


class TestBudget:
    def test_running_requests_first_then_new_ones_with_what_is_left(self) -> None:
        bench = Bench(budget=8)
        for name, prompt in (("a", 3), ("b", 12), ("c", 2)):
            bench.add(name, prompt, max_tokens=3)
        bench.run()
        assert bench.trace().splitlines() == [
            "a[0:3]* b[0:5]",
            "a[3:4]* b[5:12]*",
            "a[4:5]* b[12:13]* c[0:2]*",
            "b[13:14]* c[2:3]*",
            "c[3:4]*",
        ]

    @pytest.mark.parametrize("budget", range(1, 14))
    @pytest.mark.parametrize("chunk", [None, 1, 3])
    def test_output_does_not_depend_on_chunks(self, budget: int, chunk: int | None) -> None:
        bench = Bench(budget=budget, chunk=chunk)
        for name, prompt in (("a", 11), ("b", 5), ("c", 1)):
            bench.add(name, prompt)
        bench.run()
        for name, request in bench.requests.items():
            assert bench.output(name) == solo_output(request)
            assert bench.finish(name) == "length"

    def test_a_chunk_cap_leaves_room_for_others(self) -> None:
        bench = Bench(budget=8, chunk=3)
        bench.add("a", 7, max_tokens=1)
        bench.add("b", 4, max_tokens=1)
        bench.run()
        assert bench.trace() == "a[0:3] b[0:3]\na[3:6] b[3:4]*\na[6:7]*"

    def test_no_more_than_max_num_seqs(self) -> None:
        bench = Bench(budget=50, num_seqs=2)
        for name in "abcde":
            bench.add(name, 2, max_tokens=2)
        bench.run()
        assert max(len(plan.scheduled) for plan in bench.runner.plans) == 2

    def test_flows_take_turns(self) -> None:
        bench = Bench(budget=4, num_seqs=1)
        for name in ("x1", "x2", "x3"):
            bench.add(name, 4, 1, flow="x")
        bench.add("y1", 4, 1, flow="y")
        bench.run()
        assert bench.trace().splitlines() == ["x1[0:4]*", "y1[0:4]*", "x2[0:4]*", "x3[0:4]*"]

    def test_output_counts_for_fairness_too(self) -> None:
        bench = Bench(budget=8, num_seqs=1)
        for number in range(4):
            bench.add(f"talks{number}", 2, 10, flow="talks")
            bench.add(f"short{number}", 2, 1, flow="short")
        bench.run()
        order = [line.split("[")[0] for line in bench.trace().splitlines()]
        assert list(dict.fromkeys(order)) == ["talks0", "short0", "short1", "short2", "short3", "talks1", "talks2", "talks3"]

    def test_plans_are_the_same_every_time(self) -> None:
        traces = []
        for _ in range(2):
            bench = Bench(num_blocks=6)
            for number in range(6):
                bench.add(f"r{number}", 3 + number, 5, flow=f"f{number % 2}", adapter=[None, "p", "q"][number % 3])
            bench.run()
            traces.append(bench.trace())
        assert traces[0] == traces[1]


class TestStops:
    def test_a_stop_token_is_part_of_the_output(self) -> None:
        bench = Bench()
        free = solo_output(bench.add("free", 5, 8))
        stop = free[3]
        bench.add("stopped", bench.requests["free"].prompt_ids, 8, stop=(stop,))
        bench.run()
        assert bench.output("stopped") == free[: free.index(stop) + 1]
        assert bench.finish("stopped") == "stop"
        assert bench.finish("free") == "length"

    def test_stop_wins_over_length_on_the_last_token(self) -> None:
        bench = Bench()
        last = solo_output(bench.add("free", 5, 2))[1]
        bench.add("both", bench.requests["free"].prompt_ids, 2, stop=(last,))
        bench.run()
        assert bench.finish("both") == "stop"

    def test_the_whole_context_can_be_used(self) -> None:
        bench = Bench(max_model_len=9)
        bench.add("a", 4, 5)
        bench.run()
        assert len(bench.output("a")) == 5
        assert bench.finish("a") == "length"

    def test_one_item_for_each_token(self) -> None:
        bench = Bench()
        bench.add("a", 3, 3, logprobs=0)
        bench.run()
        shapes = [(item.first_output_index, len(item.token_ids), item.finish) for item in bench.items["a"]]
        assert shapes == [(0, 1, None), (1, 1, None), (2, 1, "length")]
        assert all(item.logprobs == [TokenLogprob(-1.0)] for item in bench.items["a"])

    def test_no_logprobs_unless_asked_for(self) -> None:
        bench = Bench()
        bench.add("a", 3, 1)
        bench.run()
        assert bench.items["a"][0].logprobs is None
        assert bench.items["a"][0].prompt_logprobs is None


class TestRejection:
    def test_longer_than_the_model_allows(self) -> None:
        bench = Bench(max_model_len=10)
        with pytest.raises(RequestRejected) as e:
            bench.add("a", 4, 7)
        assert str(e.value) == (
            "11 tokens were asked for (4 of the prompt, 7 of output), but the model's context holds 10: "
            "shorten the prompt or lower max_tokens"
        )
        assert e.value.code is ErrorCode.CONTEXT_LENGTH
        assert not bench.core.has_work
        bench.check_idle()

    def test_longer_than_memory_can_ever_hold(self) -> None:
        bench = Bench(num_blocks=3, block_size=4)
        assert bench.scheduler.max_request_tokens == 12
        with pytest.raises(RequestRejected, match=r"13 tokens .* KV memory holds 12") as e:
            bench.add("a", 9, 4)
        assert e.value.code is ErrorCode.CONTEXT_LENGTH
        bench.add("b", 9, 3)
        bench.run()
        assert bench.output("b") == solo_output(bench.requests["b"])

    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "output", "message"),
        [
            ([], 1, [], "the prompt is empty"),
            ([1, VOCAB_SIZE], 1, [], f"token id {VOCAB_SIZE} is not in 0..{VOCAB_SIZE - 1}"),
            ([-1], 1, [], "token id -1"),
            ([3, -2, 4, -1, 3], 1, [], "token id -2"),
            ([3], 4, [1, VOCAB_SIZE + 1, 2], f"token id {VOCAB_SIZE + 1}"),
            ([1], 4, [VOCAB_SIZE + 3], f"token id {VOCAB_SIZE + 3}"),
            ([1], -1, [], "max_tokens is -1"),
        ],
    )
    def test_malformed(self, prompt: list[int], max_tokens: int, output: list[int], message: str) -> None:
        bench = Bench()
        with pytest.raises(RequestRejected, match=message) as e:
            bench.add("a", prompt, max_tokens, output=output, adapter="p")
        assert e.value.code is ErrorCode.BAD_REQUEST
        bench.check_idle()

    def test_an_id_that_is_running(self) -> None:
        bench = Bench()
        bench.add("a")
        with pytest.raises(RequestRejected, match="id a is running"):
            bench.add("a")
        bench.run()
        bench.add("a")
        bench.run()
        assert bench.finish("a") == "length"


class TestPrefixCache:
    def test_a_second_request_computes_only_what_is_new(self) -> None:
        bench = Bench(budget=20)
        bench.add("a", list(range(10)), 2)
        bench.run()
        bench.add("b", [*range(9), 40, 41], 2)
        bench.run()
        assert bench.trace(last=2).splitlines()[0] == "b[8:11]*"
        assert [item.cached_tokens for item in bench.items["a"]] == [0, 0]
        assert [item.cached_tokens for item in bench.items["b"]] == [8, 0]
        assert bench.output("b") == solo_output(bench.requests["b"])
        assert bench.core.stats()["cached_tokens_total"] == 8

    def test_a_whole_prompt_that_is_cached_still_computes_a_token(self) -> None:
        bench = Bench(budget=20)
        for name in "ab":
            bench.add(name, list(range(8)), 3)
            bench.run()
        assert bench.items["b"][0].cached_tokens == 4
        assert bench.output("a") == bench.output("b")

    def test_requests_of_one_step_do_not_read_each_other(self) -> None:
        bench = Bench(budget=40)
        bench.add("a", list(range(9)), 2)
        bench.add("b", list(range(9)), 2)
        bench.run()
        assert bench.trace().splitlines()[0] == "a[0:9]* b[0:9]*"
        assert bench.core.stats()["kv_blocks_cached"] == 2, "what both computed is kept once"

    def test_a_running_requests_blocks_are_found(self) -> None:
        bench = Bench(budget=40)
        bench.add("a", list(range(9)), 9)
        bench.step()
        bench.add("b", list(range(9)), 2)
        bench.step()
        assert bench.trace(last=1) == "a[9:10]* b[8:9]*"
        bench.run()
        assert bench.output("a")[:2] == bench.output("b")

    def test_generated_tokens_are_found_by_the_next_turn(self) -> None:
        bench = Bench(budget=40)
        bench.add("a", list(range(6)), 7)
        bench.run()
        bench.add("b", [*range(6), *bench.output("a"), 1, 2, 3], 2)
        bench.run()
        assert bench.items["b"][0].cached_tokens == 12

    def test_tenants_and_adapters_are_apart(self) -> None:
        bench = Bench(budget=40, num_blocks=40)
        prompt = list(range(9))
        for name, flow, adapter in (("a", "t", None), ("b", "u", None), ("c", "t", "p"), ("d", "t", "q"), ("e", "t", "p")):
            bench.add(name, prompt, 2, flow=flow, adapter=adapter)
            bench.run()
        assert [bench.items[name][0].cached_tokens for name in "abcde"] == [0, 0, 0, 0, 8]

    def test_what_comes_before_an_adapter_is_shared_with_the_base(self) -> None:
        bench = Bench(budget=40, num_blocks=40)
        prompt = list(range(13))
        bench.add("base", prompt, 2)
        bench.run()
        bench.add("late", prompt, 2, adapter="p", adapter_start=6)
        bench.run()
        bench.add("later", prompt, 2, adapter="p", adapter_start=8)
        bench.run()
        assert [bench.items[name][0].cached_tokens for name in ("late", "later")] == [4, 8]
        for name, request in bench.requests.items():
            assert bench.output(name) == solo_output(request)

    def test_a_failed_step_leaves_nothing_findable_and_can_be_repeated(self) -> None:
        bench = Bench(budget=40)
        prompt = list(range(9))
        bench.add("a", prompt, 3, adapter="p")
        bench.runner.fail_next = True
        bench.step()  # the adapter is fetched
        with pytest.raises(RuntimeError):
            bench.step()
        assert bench.requests["a"].num_computed_tokens == 0
        bench.add("b", prompt, 3, adapter="p")
        bench.run()
        assert bench.items["b"][0].cached_tokens == 0
        for name, request in bench.requests.items():
            assert bench.output(name) == solo_output(request)

    def test_blocks_of_a_request_aborted_in_a_failed_step_are_not_found(self) -> None:
        bench = Bench(budget=40)
        bench.add("a", list(range(9)), 3)
        bench.runner.fail_next = True
        with pytest.raises(RuntimeError):
            bench.step()
        assert bench.core.abort("a") == 0
        bench.add("b", list(range(9)), 3)
        bench.run()
        assert bench.items["b"][0].cached_tokens == 0
        assert bench.output("b") == solo_output(bench.requests["b"])


class TestPromptLogprobs:
    @pytest.mark.parametrize("budget", [1, 2, 3, 9, 40])
    def test_delivered_once_with_the_first_token(self, budget: int) -> None:
        bench = Bench(budget=budget)
        prompt = list(range(20, 29))
        bench.add("warm", prompt, 1)
        bench.run()
        bench.add("a", prompt, 3, prompt_logprobs=2)
        bench.run()
        first, *rest = bench.items["a"]
        assert first.prompt_logprobs == [None, *(TokenLogprob(-float(token)) for token in prompt[1:])]
        assert [item.prompt_logprobs for item in rest] == [None, None]
        assert first.cached_tokens == 0
        assert bench.output("a") == solo_output(bench.requests["a"])

    def test_a_prompt_of_one_token(self) -> None:
        bench = Bench()
        bench.add("a", [3], 1, prompt_logprobs=0)
        bench.run()
        assert bench.items["a"][0].prompt_logprobs == [None]

    def test_without_any_output(self) -> None:
        bench = Bench(budget=3)
        bench.add("a", [3, 4, 5, 6], 0, prompt_logprobs=0)
        bench.add("b", [3, 4, 5, 6], 0)
        bench.run()
        (item,) = bench.items["a"]
        assert item.prompt_logprobs == [None, TokenLogprob(-4.0), TokenLogprob(-5.0), TokenLogprob(-6.0)]
        assert (item.token_ids, item.finish) == ([], "length")
        assert [i.finish for i in bench.items["b"]] == ["length"], "nothing to compute, so it ended at once"

    def test_computed_again_after_a_preemption_in_the_prompt(self) -> None:
        bench = Bench(num_blocks=6, block_size=2, budget=2)
        bench.add("old", 2, 10)
        bench.step()
        bench.add("a", [5, 6, 7, 8, 9, 10], 2, prompt_logprobs=0)
        bench.run()
        ranges = [(s.start, s.samples) for plan in bench.runner.plans for s in plan.scheduled if s.request.request_id == "a"]
        assert ranges == [(0, False), (1, False), (2, False), (3, False), (0, False), (2, False), (4, True), (6, True)]
        assert bench.items["a"][0].prompt_logprobs == [None, *(TokenLogprob(-float(token)) for token in range(6, 11))]
        assert bench.output("a") == solo_output(bench.requests["a"])

    def test_not_computed_again_after_a_preemption_in_the_output(self) -> None:
        bench = Bench(num_blocks=6, block_size=2, budget=16, caching=False)
        bench.add("old", 2, 8)
        bench.add("a", [5, 6, 7, 8], 5, prompt_logprobs=0)
        bench.run()
        assert bench.core.stats()["preemptions_total"] >= 1
        assert [item.prompt_logprobs is not None for item in bench.items["a"]] == [True, False, False, False, False]
        ranges = [s for plan in bench.runner.plans for s in plan.scheduled if s.request.request_id == "a"]
        assert [s.start for s in ranges].count(0) == 2, "it was computed twice"
        assert bench.output("a") == solo_output(bench.requests["a"])


class TestResumption:
    @pytest.mark.parametrize("resumed", range(1, 6))
    def test_output_goes_on_where_it_stopped(self, resumed: int) -> None:
        bench = Bench(budget=3)
        whole = solo_output(bench.add("whole", 5, 6))
        bench.add("again", bench.requests["whole"].prompt_ids, 6, output=whole[:resumed])
        bench.run()
        assert bench.output("again") == whole
        assert [item.first_output_index for item in bench.items["again"]] == list(range(resumed, 6))
        assert bench.finish("again") == "length"

    def test_one_that_had_ended_ends_at_once_without_computing(self) -> None:
        bench = Bench()
        bench.add("long", 4, 2, output=[7, 8], adapter="p")
        bench.add("stopped", 4, 5, output=[7, 9], stop=(9,))
        assert bench.core.has_work
        items = bench.step()
        assert [(i.request_id, i.first_output_index, i.token_ids, i.finish) for i in items] == [
            ("long", 2, [], "length"),
            ("stopped", 2, [], "stop"),
        ]
        assert bench.runner.plans == []
        bench.check_idle()

    def test_prompt_logprobs_are_not_sent_twice(self) -> None:
        bench = Bench()
        bench.add("a", [1, 2, 3], 3, prompt_logprobs=1, output=[4])
        bench.run()
        assert [item.prompt_logprobs for item in bench.items["a"]] == [None, None]

    def test_cached_tokens_come_with_its_first_item_and_count_the_prompt_only(self) -> None:
        bench = Bench(budget=40)
        bench.add("a", list(range(5)), 8)
        bench.run()
        bench.add("b", list(range(5)), 9, output=bench.output("a"))
        bench.run()
        assert [item.cached_tokens for item in bench.items["b"]] == [5]


class TestPreemption:
    def test_the_last_to_start_gives_way_and_goes_on_with_the_same_output(self) -> None:
        bench = Bench(num_blocks=4, block_size=2, budget=8)
        bench.add("a", 2, 4)
        bench.add("b", 2, 4)
        bench.run()
        assert bench.trace().splitlines() == [
            "a[0:2]* b[0:2]*",
            "a[2:3]* b[2:3]*",
            "a[3:4]* b[3:4]*",
            "a[4:5]*",  # needs a third block: b gives back two, and loses one of them
            "b[2:5]*",
        ]
        assert bench.core.stats()["preemptions_total"] == 1
        for name, request in bench.requests.items():
            assert bench.output(name) == solo_output(request)

    def test_blocks_given_back_are_found_again_if_nobody_took_them(self) -> None:
        bench = Bench(num_blocks=5, block_size=2, budget=8)
        bench.add("a", 3, 4)
        bench.add("b", 4, 4)
        for _ in range(3):
            bench.step()
        assert bench.requests["b"].status is RequestStatus.PREEMPTED
        assert bench.requests["b"].block_ids == []
        bench.core.abort("a")
        bench.step()
        (restarted,) = bench.runner.plans[-1].scheduled
        assert restarted.start > 0
        assert bench.items["b"][0].cached_tokens == 0, "it had found nothing when it first started"
        bench.run()
        assert bench.output("b") == solo_output(bench.requests["b"])

    def test_no_deadlock_when_half_computed_prompts_hold_all_blocks(self) -> None:
        bench = Bench(num_blocks=16, block_size=2, budget=8, chunk=1, num_seqs=4, caching=False)
        bench.add("old", 2, 16)
        for name in "abc":
            bench.add(name, 10, 4)
        torn = 0
        while bench.core.has_work:
            half = [r for r in bench.requests.values() if 0 < r.num_computed_tokens < len(r.prompt_ids)]
            full = bench.core.stats()["kv_blocks_free"] == 0
            bench.step()
            torn += full and any(r.status is RequestStatus.PREEMPTED for r in half)
        assert torn > 0, "no prompt was torn up, so this shows nothing"
        bench.check_idle()
        for name, request in bench.requests.items():
            assert bench.output(name) == solo_output(request)

    def test_two_long_prompts_are_not_let_in_to_take_each_others_blocks(self) -> None:
        bench = Bench(num_blocks=8, block_size=2, budget=4, chunk=2)
        bench.add("a", 10, 1)
        bench.add("b", 10, 1)
        bench.run()
        assert bench.core.stats()["preemptions_total"] == 0
        assert [line.split("[")[0] for line in bench.trace().splitlines()] == ["a"] * 5 + ["b"] * 5

    def test_a_request_that_needs_all_memory_is_not_passed_for_ever(self) -> None:
        bench = Bench(num_blocks=8, block_size=2, budget=16)
        bench.add("small0", 2, 3)
        bench.add("small1", 2, 6)
        bench.step()
        bench.add("whole", 15, 1)
        for number in range(2, 30):
            bench.add(f"small{number}", 2, 3)
        steps = 0
        while not bench.items["whole"]:
            bench.step()
            steps += 1
        assert steps < 8
        bench.run()

    def test_a_preempted_request_is_charged_once(self) -> None:
        def charged(num_blocks: int) -> float:
            bench = Bench(num_blocks=num_blocks, block_size=2, budget=8)
            bench.add("a", 2, 4, flow="a")
            bench.add("b", 2, 4, flow="b")
            bench.run()
            return bench.scheduler._waiting.counter("b")

        assert charged(4) == charged(40) == 2 + 2 * 4


class TestEndings:
    @pytest.mark.parametrize("steps", range(7))
    def test_abort_at_any_time_gives_everything_back(self, steps: int) -> None:
        bench = Bench(num_blocks=5, block_size=2, budget=3)
        bench.add("a", 3, 5, adapter="p")
        bench.add("b", 4, 4, adapter="q")
        for _ in range(steps):
            bench.step()
        done = {name: bench.output(name) for name in "ab"}
        ended = {name for name in "ab" if bench.finish(name)}
        for name in "ab":
            assert bench.core.abort(name) == (None if name in ended else len(done[name]))
        assert not bench.core.has_work
        bench.check_idle()
        assert bench.core.abort("a") is None
        assert bench.core.step() == []

    def test_abort_while_the_step_runs(self) -> None:
        bench = Bench()
        bench.add("a", 3, 5)
        bench.add("b", 3, 5)
        plan = bench.scheduler.schedule()
        results = bench.runner.execute(plan)
        bench.core.abort("a")
        assert [item.request_id for item in bench.scheduler.update(plan, results)] == ["b"]
        assert bench.core.check_integrity() == []
        bench.items["b"] = []
        bench.requests["b"].num_resumed_tokens = 1
        bench.run()

    def test_time_limit_of_waiting_and_running_requests(self) -> None:
        bench = Bench(budget=8, num_seqs=1)
        bench.add("running", 4, 20, time_limit=5.0, adapter="p")
        bench.add("waiting", 4, 20, time_limit=6.0, adapter="p")
        bench.add("patient", 4, 2)
        for _ in range(5):
            bench.step()
        bench.now += 10
        bench.run()
        for name, status, made in (("running", "running", len(bench.output("running"))), ("waiting", "waiting", 0)):
            last = bench.items[name][-1]
            assert last.finish == "error"
            assert last.error is not None
            assert last.error.code == "timeout"
            assert last.error.message == f"the time limit passed after 10.0 s; it was {status}, with {made} of at most 20 tokens"
            assert last.first_output_index == made
        assert bench.finish("patient") == "length"

    def test_a_time_limit_of_an_ended_request_does_not_end_another_of_its_name(self) -> None:
        bench = Bench()
        bench.add("a", 4, 1, time_limit=5.0)
        bench.run()
        bench.add("a", 4, 3)
        bench.now += 10
        bench.run()
        assert bench.finish("a") == "length"


def test_who_runs_for_the_first_time_is_told_before_the_step() -> None:
    bench = Bench(num_blocks=4, block_size=2, budget=8)
    told: list[tuple[int, list[str]]] = []
    bench.core.on_running = lambda ids: told.append((len(bench.runner.plans), list(ids)))
    bench.add("a", 2, 4)
    bench.add("b", 2, 4)
    bench.run()
    assert bench.core.stats()["preemptions_total"] == 1
    assert told == [(0, ["a", "b"])], "once each, though b started twice"


def test_stats() -> None:
    bench = Bench(budget=8, num_seqs=1)
    bench.add("a", 5, 2)
    bench.add("b", 5, 2)
    bench.step()
    stats = bench.core.stats()
    assert stats == {
        "requests_waiting": 1,
        "requests_running": 1,
        "kv_blocks_total": 16,
        "kv_blocks_free": 14,
        "kv_blocks_cached": 0,
        "kv_blocks_used": 2,
        "prompt_tokens_total": 5,
        "output_tokens_total": 1,
        "cached_tokens_total": 0,
        "preemptions_total": 0,
        "steps_total": 1,
        "step_tokens_total": 5,
    }
    bench.run()
    assert bench.core.stats()["output_tokens_total"] == 4


def test_integrity_names_what_is_off() -> None:
    bench = Bench()
    request = bench.add("a", 5, 9, adapter="p")
    while not bench.core.last_num_tokens:
        bench.step()
    block = request.block_ids.pop()
    bench.scheduler._adapters._device["p"] += 1
    bench.scheduler._running.clear()
    assert bench.core.check_integrity() == [
        f"block {block} has 1 references and 0 holders",
        "adapter p has 2 device references and 1 requests or steps that hold it there",
        "0 requests are listed as running and 1 are",
    ]


def test_a_plan_that_failed_is_made_again() -> None:
    bench = Bench()
    bench.add("a", 5, 3)
    bench.runner.fail_next = True
    with pytest.raises(RuntimeError):
        bench.step()
    bench.step()
    first, second = (trace_line(plan) for plan in bench.runner.plans)
    assert first == second == "a[0:5]*"


def test_none_of_this_imports_torch() -> None:
    modules = ["kv.manager", "sched.scheduler", "sched.plan", "core", "config", "request", "messages", "errors"]
    imports = "; ".join(f"import graftwork_engine.{name}" for name in modules)
    heavy = "{'torch', 'transformers', 'safetensors', 'numpy'}"
    code = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}; {imports}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"
