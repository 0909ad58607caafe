"""The whole core under random use: whatever is added, aborted, delayed or fails, output is exact and everything comes back."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from property_budget import budget

from graftwork_adapters.wholes import WholeFacts
from graftwork_engine.errors import ErrorCode
from graftwork_engine.request import RequestStatus
from graftwork_engine.sched.plan import AdapterFailure
from scripted_engine import VOCAB_SIZE, Bench, ScriptedGate, solo_output

BROKEN = AdapterFailure("adapter_corrupt", "its bytes are not what its key says")
ADAPTERS = ("p", "q", "r", "broken", "odd")
FACTS = {"q": WholeFacts(700, None), "r": WholeFacts(90, VOCAB_SIZE + 3), "odd": WholeFacts(90, VOCAB_SIZE + 5)}
"""Of adapters that bring tensors whole; requests for "odd" are admitted for another vocabulary than it turns out to have."""
KNOWN = {"r": VOCAB_SIZE + 3, "odd": VOCAB_SIZE + 4}
NEVER = "never"
"""An adapter whose load hangs: its requests wait until they are aborted or their time is up, and hold nobody up."""


class CoreMachine(RuleBasedStateMachine):
    """The scripted runner compares every block it reads with the reader's own history, so a wrong prefix hit cannot pass."""

    is_ahead = False

    @initialize(
        num_blocks=st.integers(4, 12),
        block_size=st.integers(1, 3),
        budget=st.integers(1, 9),
        num_seqs=st.integers(1, 4),
        chunk=st.sampled_from([None, 1, 2]),
        num_places=st.integers(1, 3),
        delays=st.lists(st.integers(0, 4), min_size=5, max_size=5),
        caching=st.booleans(),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        num_seqs: int,
        chunk: int | None,
        num_places: int,
        delays: list[int],
        caching: bool,
    ) -> None:
        gate = ScriptedGate(num_places, {**dict(zip(ADAPTERS, delays, strict=True)), NEVER: 10**9}, {"broken": BROKEN}, FACTS)
        self.bench = Bench(
            num_blocks=num_blocks,
            block_size=block_size,
            budget=budget,
            num_seqs=num_seqs,
            chunk=chunk,
            caching=caching,
            gate=gate,
            is_ahead=self.is_ahead,
            base_bytes=1000,
        )
        self.capacity = num_blocks * block_size
        self.aborted: set[str] = set()
        self.told: list[str] = []
        self.bench.core.on_running = self.told.extend

    @rule(
        data=st.data(),
        flow=st.sampled_from("tu"),
        adapter=st.sampled_from([None, None, *ADAPTERS, NEVER]),
        num_choices=st.sampled_from([1, 1, 1, 2, 3]),
        adapter_start=st.integers(0, 3),
        max_tokens=st.integers(1, 6),
        resumed=st.integers(0, 6),
        wants_prompt=st.booleans(),
        time_limit=st.sampled_from([None, None, 3.0]),
        stops=st.booleans(),
        is_penalised=st.booleans(),
    )
    def add(
        self,
        data: st.DataObject,
        flow: str,
        adapter: str | None,
        num_choices: int,
        adapter_start: int,
        max_tokens: int,
        resumed: int,
        wants_prompt: bool,
        time_limit: float | None,
        stops: bool,
        is_penalised: bool,
    ) -> None:
        max_tokens = min(max_tokens, self.capacity - 1)
        length = data.draw(st.integers(1, min(8, self.capacity - max_tokens)))
        prompt = [0] * length
        prompt[-1] = data.draw(st.integers(0, 1))  # prompts that are mostly alike, so that prefixes are found
        stop = tuple(range(0, 50, 7)) if stops else ()
        for choice in range(num_choices):
            name = f"r{len(self.bench.requests)}"
            what: dict[str, Any] = {
                "adapter": adapter,
                "adapter_start": min(adapter_start, length),
                "vocab_size": None if adapter is None else KNOWN.get(adapter),
                "flow": flow,
                "stop": stop,
                "choice": choice,
                "repetition_penalty": 1.2 if is_penalised else 1.0,
            }
            solo = solo_output(Bench(num_blocks=99).add(name, list(prompt), max_tokens, **what))
            self.bench.add(
                name,
                list(prompt),
                max_tokens,
                **what,
                output=solo[:resumed] if resumed > 3 else [],
                time_limit=time_limit,
                prompt_logprobs=0 if wants_prompt else None,
            )

    @precondition(lambda self: self.bench.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.bench.requests)))
        count = self.bench.core.abort(name)
        if count is not None:
            self.aborted.add(name)
            assert count == self.bench.requests[name].num_output_tokens

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.bench.step()

    @precondition(lambda self: not self.is_ahead)
    @rule()
    def fail_a_step(self) -> None:
        self.bench.runner.fail_next = True
        try:
            self.bench.step()
        except RuntimeError:
            assert self.bench.core.check_integrity() == []
        self.bench.runner.fail_next = False

    @rule()
    def let_time_pass(self) -> None:
        self.bench.now += 1

    @invariant()
    def plans_keep_the_limits(self) -> None:
        for plan in self.bench.runner.plans[-4:]:
            assert 0 < plan.num_tokens <= self.bench.limits.max_num_batched_tokens
            assert len(plan.scheduled) <= self.bench.limits.max_num_seqs
            assert len({s.request.request_id for s in plan.scheduled}) == len(plan.scheduled)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self._end_all_but_those_that_never_can()
        self.bench.run(max_steps=3000)
        for name, request in self.bench.requests.items():
            assert request.status is RequestStatus.FINISHED
            self._check_ending(name)
        assert len(self.told) == len(set(self.told)), "a request runs for the first time once"
        assert {s.request.request_id for plan in self.bench.runner.plans for s in plan.scheduled} == set(self.told)

    def _end_all_but_those_that_never_can(self) -> None:
        def unfinished() -> list[str]:
            return [name for name, request in self.bench.requests.items() if request.status is not RequestStatus.FINISHED]

        for _ in range(3000):
            if all(self.bench.requests[name].adapter_key == NEVER for name in unfinished()):
                break
            self.bench.step()
        for name in unfinished():
            assert self.bench.requests[name].status is RequestStatus.WAITING
            self.bench.core.abort(name)
            self.aborted.add(name)

    def _check_ending(self, name: str) -> None:
        request, items = self.bench.requests[name], self.bench.items[name]
        output, finish = self.bench.output(name), self.bench.finish(name)
        solo = solo_output(request)
        assert output == solo[: len(output)]
        if name in self.aborted:
            assert finish is None
        elif finish == "error":
            error = items[-1].error
            assert error is not None
            assert error.code in ("timeout", BROKEN.code, ErrorCode.INTERNAL)
            assert (error.code == BROKEN.code) <= (request.adapter_key == "broken")
            assert (error.code == ErrorCode.INTERNAL) <= (request.adapter_key == "odd")
        elif request.adapter_key == "odd":
            assert request.num_resumed_tokens == len(solo), "it ran with an adapter of another vocabulary"
        else:
            assert output == solo
            assert finish == ("stop" if solo[-1] in request.sampling.stop_token_ids else "length")
            sent = [item.prompt_logprobs for item in items if item.prompt_logprobs is not None]
            wanted = request.sampling.prompt_logprobs is not None and not request.num_resumed_tokens
            assert [len(logprobs) for logprobs in sent] == ([len(request.prompt_ids)] if wanted else [])
        assert all(item.cached_tokens == 0 for item in items[1:])


class AheadMachine(CoreMachine):
    """The same of a core that plans a step before it knows what the last one drew. There a step that fails ends the engine."""

    is_ahead = True


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = budget(80, steps=30)
TestAheadMachine = AheadMachine.TestCase
TestAheadMachine.settings = budget(80, steps=30)
