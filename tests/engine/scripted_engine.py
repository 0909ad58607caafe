"""An engine without a model: a runner whose KV memory remembers whole histories, an adapter gate by script, and a clock by hand.

The runner's next token is a function of everything before it, read back from the blocks it was given. So one wrong block, adapter
or position shows at once, either as a complaint of the runner or as an output that differs from `solo_output`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from graftwork_adapters.wholes import WholeFacts
from graftwork_engine.ahead import AheadCore
from graftwork_engine.core import EngineCore
from graftwork_engine.kv.manager import KVCacheManager
from graftwork_engine.messages import OutItem, Sampling, TokenLogprob
from graftwork_engine.request import AdapterKey, Request, RequestId, RequestStatus
from graftwork_engine.sched.limits import SchedulerLimits
from graftwork_engine.sched.plan import BASE, AdapterFailure, RequestResult, ScheduledRequest, StepPlan
from graftwork_engine.sched.scheduler import Scheduler

VOCAB_SIZE = 50


def adapter_of(request: Request, position: int) -> str | None:
    return request.adapter_key if position >= request.adapter_start else None


def histories(request: Request, token_ids: list[int]) -> list[bytes]:
    """For each token, a hash of who asked, and of all tokens and adapters up to it."""
    state, made = request.cache_salt, []
    for position, token_id in enumerate(token_ids):
        state = hashlib.sha256(b"%s/%d/%s" % (state, token_id, str(adapter_of(request, position)).encode())).digest()
        made.append(state)
    return made


def next_token(history: bytes, sampling: Sampling, output_index: int) -> int:
    noise = hashlib.sha256(b"%s/%d/%d/%d" % (history, sampling.seed, sampling.choice, output_index)).digest()
    return int.from_bytes(noise[:4], "little") % VOCAB_SIZE


def solo_output(request: Request) -> list[int]:
    """All output the request must have, from its prompt alone."""
    output: list[int] = []
    while len(output) < request.sampling.max_tokens:
        history = histories(request, request.prompt_ids + output)[-1]
        output.append(next_token(history, request.sampling, len(output)))
        if output[-1] in request.sampling.stop_token_ids:
            break
    return output


class ScriptedRunner:
    """Executes plans on a KV memory of histories; ``plans`` keeps all of them, ``fail_next`` makes the next one raise midway."""

    def __init__(self, gate: ScriptedGate, block_size: int) -> None:
        self._gate = gate
        self._block_size = block_size
        self._memory: dict[int, bytes] = {}
        self._launched = StepPlan([])
        self.plans: list[StepPlan] = []
        self.fail_next = False

    def execute(self, plan: StepPlan) -> list[RequestResult | int]:
        self.plans.append(plan)
        written: set[int] = set()
        for s in plan.scheduled:
            self._check(s)
            history = histories(s.request, s.request.token_ids(0, s.start + s.num_tokens))
            for position in range(s.start, s.start + s.num_tokens):
                slot = self._slot(s, position)
                assert slot not in written, "two rows of one step write the same slot"
                written.add(slot)
                self._memory[slot] = b"garbage" if self.fail_next else history[position]
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the step failed midway")
        return [self._result(s) for s in plan.scheduled]

    def launch(self, plan: StepPlan) -> Callable[[], list[RequestResult | int]]:
        """As a device does it: at some time after the next plan was made, and in order, since each is waited for in order."""
        before, self._launched = self._launched, plan
        for s in plan.scheduled:
            self._check_adapter(s)
            if s.follows:  # its token is one that the step before draws
                (drawing,) = [other for other in before.scheduled if other.block_ids is s.block_ids]
                assert drawing.samples
                assert drawing.start + drawing.num_tokens == s.start == s.request.num_tokens
                assert s.num_tokens == 1
                assert not s.request.needs_history
            else:
                assert s.start + s.num_tokens <= s.request.num_tokens
        return partial(self.execute, plan)

    def _slot(self, s: ScheduledRequest, position: int) -> int:
        return s.block_ids[position // self._block_size] * self._block_size + position % self._block_size

    def _check(self, s: ScheduledRequest) -> None:
        request, end = s.request, s.start + s.num_tokens
        assert s.num_tokens > 0
        assert len(s.block_ids) * self._block_size >= end
        if request.status is RequestStatus.RUNNING and request.block_ids is s.block_ids:  # it has not gone since it was launched
            assert s.start == request.num_computed_tokens
            assert s.samples == (end == request.num_tokens and request.num_output_tokens < request.sampling.max_tokens)
        self._check_adapter(s)

    def _check_adapter(self, s: ScheduledRequest) -> None:
        key = s.request.adapter_key
        if key is None:
            assert s.adapter_index == BASE
        else:
            assert self._gate.resident[key] == s.adapter_index, "the adapter is not where the plan says"
            assert self._gate.references[key] > 0, "nobody holds the adapter there"

    def _result(self, s: ScheduledRequest) -> RequestResult | int:
        request, end = s.request, s.start + s.num_tokens
        expected = histories(request, request.token_ids(0, end))
        for position in range(end):
            assert self._memory[self._slot(s, position)] == expected[position], f"{request.request_id} reads another's {position}"
        token_id = next_token(expected[-1], request.sampling, request.num_output_tokens) if s.samples else None
        wants = request.sampling.logprobs is not None and s.samples
        prompt_logprobs = None
        if request.sampling.prompt_logprobs is not None:
            targets = request.prompt_ids[s.start + 1 : end + 1]
            prompt_logprobs = [TokenLogprob(-float(token)) for token in targets]
        if token_id is not None and token_id % 2 and not wants and not prompt_logprobs:
            return token_id  # a token alone may come in either form
        return RequestResult(token_id, TokenLogprob(-1.0) if wants else None, prompt_logprobs)


@dataclass
class ScriptedGate:
    """Adapters that take ``fetch_polls[key]`` polls to the host and one more to one of ``num_places`` on the device."""

    num_places: int = 4
    fetch_polls: dict[str, int] = field(default_factory=dict)
    failures: dict[str, AdapterFailure] = field(default_factory=dict)
    facts: dict[str, WholeFacts] = field(default_factory=dict)  # of those that bring tensors whole
    holds: Counter[str] = field(default_factory=Counter)
    references: Counter[str] = field(default_factory=Counter)
    resident: dict[str, int] = field(default_factory=dict)  # the least recently used first
    _fetching: dict[str, int] = field(default_factory=dict)
    _on_host: set[str] = field(default_factory=set)
    _copying: dict[str, int] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)

    def hold(self, key: str) -> None:
        self.holds[key] += 1
        if key not in self._on_host and key not in self._failed:
            self._fetching.setdefault(key, self.fetch_polls.get(key, 0))

    def drop(self, key: str) -> None:
        assert self.holds[key] > 0, f"{key} was dropped more often than held"
        self.holds[key] -= 1
        if not self.holds[key]:
            self._failed.discard(key)

    def acquire(self, key: str) -> int | None:
        assert self.holds[key] > 0, "acquired by a request that does not hold it"
        if key in self.resident:
            self.references[key] += 1
            self.resident[key] = self.resident.pop(key)
            return self.resident[key]
        if key in self._on_host and key not in self._copying:
            place = self._make_room()
            if place is not None:
                self._copying[key] = place
        return None

    def release(self, key: str) -> None:
        assert self.references[key] > 0, f"{key} was released more often than acquired"
        self.references[key] -= 1

    def wholes(self, index: int) -> WholeFacts | None:
        (key,) = [key for key, place in self.resident.items() if place == index and self.references[key]]
        return self.facts.get(key)

    def needs_room(self, key: str) -> bool:
        taken = len(self._copying) + sum(1 for k in self.resident if self.references[k])
        return key in self._on_host and key not in self._copying and key not in self.resident and taken >= self.num_places

    def failure(self, key: str) -> AdapterFailure | None:
        return self.failures[key] if key in self._failed else None

    def poll(self) -> bool:
        for key, place in self._copying.items():
            self.resident[key] = place
        changed = bool(self._copying)
        self._copying.clear()
        for key, polls in list(self._fetching.items()):
            self._fetching[key] = polls - 1
            if polls <= 0:
                del self._fetching[key]
                (self._failed if key in self.failures else self._on_host).add(key)
                changed = True
        return changed

    def discrepancies(self, holds: Mapping[str, int], references: Mapping[str, int]) -> list[str]:
        found = [f"{+self.holds} are held, {dict(holds)} should be"] if +self.holds != Counter(holds) else []
        if +self.references != Counter(references):
            found.append(f"{+self.references} are referenced, {dict(references)} should be")
        return found

    def is_balanced(self) -> bool:
        return not +self.holds and not +self.references

    def _make_room(self) -> int | None:
        taken = {*self.resident.values(), *self._copying.values()}
        for place in range(self.num_places):
            if place not in taken:
                return place
        for key in self.resident:
            if not self.references[key]:
                return self.resident.pop(key)
        return None


class Bench:
    """A whole engine core around the scripted runner and gate. ``items`` keeps what each request was sent."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        block_size: int = 4,
        budget: int = 8,
        num_seqs: int = 4,
        max_model_len: int = 1000,
        chunk: int | None = None,
        caching: bool = True,
        gate: ScriptedGate | None = None,
        is_ahead: bool = False,
        base_bytes: int = 0,
    ) -> None:
        self.now = 100.0
        self.gate = gate or ScriptedGate()
        self.kv = KVCacheManager(num_blocks, block_size, "base", enable_prefix_caching=caching)
        self.limits = SchedulerLimits(budget, num_seqs, max_model_len, VOCAB_SIZE, chunk, base_bytes)
        self.scheduler = Scheduler(self.limits, self.kv, self.gate, lambda: self.now)
        self.runner = ScriptedRunner(self.gate, block_size)
        self.core = (AheadCore if is_ahead else EngineCore)(self.scheduler, self.runner, self.gate)
        self.requests: dict[str, Request] = {}
        self.items: dict[str, list[OutItem]] = {}

    def add(
        self,
        name: str,
        prompt: int | list[int] = 4,
        max_tokens: int = 4,
        *,
        adapter: str | None = None,
        adapter_start: int = 0,
        vocab_size: int | None = None,
        flow: str = "tenant",
        output: list[int] | None = None,
        time_limit: float | None = None,
        stop: tuple[int, ...] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        repetition_penalty: float = 1.0,
        seed: int = 7,
        choice: int = 0,
    ) -> Request:
        """Add a request; a number for a prompt means tokens of its own, derived from ``name``."""
        if isinstance(prompt, int):
            prompt = [(sum(name.encode()) * 7 + i) % VOCAB_SIZE for i in range(prompt)]
        request = Request(
            request_id=RequestId(name),
            prompt_ids=prompt,
            sampling=Sampling(
                max_tokens,
                seed,
                choice,
                stop_token_ids=stop,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                repetition_penalty=repetition_penalty,
            ),
            cache_salt=flow.encode(),
            flow=flow,
            arrival=self.now,
            adapter_key=None if adapter is None else AdapterKey(adapter),
            adapter_start=adapter_start,
            vocab_size=vocab_size,
            deadline=None if time_limit is None else self.now + time_limit,
            output_ids=list(output or []),
            num_resumed_tokens=len(output or []),
        )
        self.core.add(request)
        self.requests[name] = request
        self.items[name] = []
        return request

    def step(self) -> list[OutItem]:
        items = self.core.step()
        for item in items:
            self.items[item.request_id].append(item)
        assert self.core.last_num_tokens <= self.limits.max_num_batched_tokens
        assert self.core.check_integrity() == []
        return items

    def run(self, max_steps: int = 1000) -> None:
        """Step until all is done, then look whether everything is back."""
        for _ in range(max_steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "it does not come to an end"
        self.check_idle()

    def check_idle(self) -> None:
        stats = self.core.stats()
        assert stats["kv_blocks_used"] == stats["requests_running"] == stats["requests_waiting"] == 0
        assert stats["kv_blocks_free"] + stats["kv_blocks_cached"] == stats["kv_blocks_total"]
        assert self.core.check_integrity() == []
        assert self.gate.is_balanced()

    def output(self, name: str) -> list[int]:
        """All output the client has, put together by index; each item must begin where the last one ended."""
        got = self.requests[name].output_ids[: self.requests[name].num_resumed_tokens]
        for item in self.items[name]:
            assert item.first_output_index == len(got)
            got = got + item.token_ids
        return got

    def finish(self, name: str) -> str | None:
        """Why the request ended; only its last item may say so."""
        finishes = [item.finish for item in self.items[name]]
        assert all(finish is None for finish in finishes[:-1])
        return finishes[-1] if finishes else None

    def trace(self, *, last: int | None = None) -> str:
        """The plans so far, one line each: name[start:end], @ the adapter's place, * where a token is drawn."""
        return "\n".join(trace_line(plan) for plan in self.runner.plans[-(last or 0) :])


def trace_line(plan: StepPlan) -> str:
    def show(s: ScheduledRequest) -> str:
        place = "" if s.adapter_index == BASE else f"@{s.adapter_index}"
        return f"{s.request.request_id}[{s.start}:{s.start + s.num_tokens}]{place}{'*' if s.samples else ''}"

    return " ".join(show(s) for s in plan.scheduled)
