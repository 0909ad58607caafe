"""Who computes how many tokens in the next step, and what a step's results mean for each request. Refuses to know tensors.

There is no prefill and no decode phase: in every step each running request is dealt the tokens it has not computed, as far as the
budget goes, and then waiting ones are started with what is left.

    step budget  |A|B|C|<──── D: the next chunk ────>|<── E: found in the cache up to here, starts ──>|
                  running, in the order they started                waiting, in fair order

When blocks run out, the request that started last gives its own back and computes them again later: so the one that started
first always goes on, and some request always ends.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

from graftwork_engine.errors import ErrorCode, RequestRejected
from graftwork_engine.kv.manager import KVCacheManager
from graftwork_engine.messages import EngineError, OutItem
from graftwork_engine.request import FinishReason, Request, RequestId, RequestStatus
from graftwork_engine.sched.adapter_refs import AdapterRefs
from graftwork_engine.sched.admission import check_request
from graftwork_engine.sched.costs import COST_OF_OUTPUT_TOKEN, COST_OF_PROMPT_TOKEN, weigh
from graftwork_engine.sched.ending import due_prompt_logprobs, finish_reason, keep_prompt_logprobs
from graftwork_engine.sched.fair_queue import FairQueue
from graftwork_engine.sched.limits import SchedulerLimits
from graftwork_engine.sched.plan import AdapterGate, RequestResult, Results, ScheduledRequest, StepPlan

RUNNING = RequestStatus.RUNNING  # looking up a member of an enumeration costs as much as a call

MAX_PASSED_OVER = 256
"""Requests without their adapter that one step looks at. With more of them, a pass over the line takes several steps."""


class Scheduler:
    """Owns every unfinished request. Call `schedule`, run the plan, call `update`; `add` and `abort` in between.

    All of a step's progress is booked in `update`: a plan whose execution failed may simply be scheduled again, unless it was told
    that it was launched.
    """

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager, gate: AdapterGate, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._kv = kv
        self._adapters = AdapterRefs(gate)
        self._clock = clock
        self._requests: dict[RequestId, Request] = {}
        self._waiting: FairQueue[Request] = FairQueue()
        self._running: list[Request] = []  # in the order they started
        self._deadlines: list[tuple[float, int, RequestId]] = []  # a heap; entries of finished requests are void
        self._ended: list[OutItem] = []  # last items of requests that ended outside a step; they go out with the next one
        self._num_added = 0
        self._is_pass_unfinished = False  # the last step stopped looking at `MAX_PASSED_OVER`
        self._is_draining = False  # until the pass ends: no adapter request starts, so that one that was passed often gets room
        self._num_adapter_starts = 0
        self._needed_room_since: dict[RequestId, int] = {}  # value of the above when it was first seen
        self._counts = dict.fromkeys(("prompt_tokens_total", "output_tokens_total", "cached_tokens_total", "preemptions_total"), 0)

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output that a request may have: what the model allows and KV memory can hold."""
        return min(self._limits.max_model_len, self._kv.num_token_slots)

    @property
    def has_work(self) -> bool:
        """True while there is a request to run or an item to hand over."""
        return bool(self._requests or self._ended)

    def add(self, request: Request) -> None:
        """Take in a new request; raises `RequestRejected` if it can never run.

        One that was resumed after its last token ends at once, with the next `update`.
        """
        if request.request_id in self._requests:
            raise RequestRejected(ErrorCode.BAD_REQUEST, f"a request with the id {request.request_id} is running")
        check_request(request, self._limits.vocab_size, self._limits.max_model_len, self.max_request_tokens)
        reason = finish_reason(request)
        if reason is not None:
            request.move_to(RequestStatus.FINISHED)
            self._ended.append(OutItem(request.request_id, request.num_output_tokens, finish=reason.value))
            return
        request.order = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        self._adapters.hold(request)
        self._waiting.push(request)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.order, request.request_id))

    def abort(self, request_id: str) -> int | None:
        """Stop a request and return how many output tokens it has; None if there is none of that id. No item follows."""
        request = self._requests.get(RequestId(request_id))
        if request is None:
            return None
        self._end(request)
        return request.num_output_tokens

    def schedule(self) -> StepPlan:
        """The next step's plan; empty if nothing can run now. Running requests come first, in the order they started."""
        self._fail_expired()
        scheduled: list[ScheduledRequest] = []
        budget = self._continue_running(scheduled)
        newly_running = self._start_waiting(scheduled, budget)
        return StepPlan(scheduled, newly_running)

    def launch(self, plan: StepPlan) -> None:
        """The plan begins to run, and the next one may be made before its results are there: as if they were, as far as that goes.

        Each launched plan's `update` must follow, in order, one plan late at the most.
        """
        self._adapters.launch()
        for scheduled in plan.scheduled:
            scheduled.request.num_ahead += scheduled.num_tokens
            scheduled.request.num_drawing += scheduled.samples

    @property
    def needs_results(self) -> bool:
        """Whether some request's next step cannot be planned before the results of the launched one are there."""
        return any(request.num_drawing and request.needs_history for request in self._running)

    def take_ended(self) -> list[OutItem]:
        """The last items of requests that ended outside a step since they were last asked for."""
        items, self._ended = self._ended, []
        return items

    def update(self, plan: StepPlan, results: Results) -> list[OutItem]:
        """Book what the plan's execution made; the items to send, those of requests that ended since the last call first."""
        self._adapters.retire()
        items = self.take_ended()
        block_size = self._kv.block_size
        drawn_for: list[Request] = []
        for scheduled, result in zip(plan.scheduled, results, strict=True):
            request, num_tokens = scheduled.request, scheduled.num_tokens
            if request.status is not RUNNING:
                continue  # aborted while the step ran
            if request.num_ahead:
                if request.block_ids is not scheduled.block_ids:
                    continue  # preempted while the step ran, and running again
                request.num_ahead -= num_tokens
                request.num_drawing -= scheduled.samples
            if not isinstance(result, int) and result.failure is not None:
                items.append(self._fail_in_step(request, result.failure))
                continue
            request.num_computed_tokens = end = scheduled.start + num_tokens
            if end % block_size < num_tokens:
                self._kv.register(request, end - num_tokens, end)
            if scheduled.samples:
                drawn_for.append(request)
            if isinstance(result, int):
                output_ids, sampling = request.output_ids, request.sampling
                index = len(output_ids)
                # Neither its first token nor its last, as most are.
                if request.num_resumed_tokens < index < sampling.max_tokens - 1 and result not in sampling.stop_token_ids:
                    output_ids.append(result)
                    items.append(OutItem(request.request_id, index, [result]))
                    continue
                result = RequestResult(result)
            if request.sampling.prompt_logprobs is not None:
                keep_prompt_logprobs(request, result)
            if scheduled.samples:
                items.append(self._take_token(request, result))
            elif end == request.num_tokens:
                items.append(self._end_without_token(request))
        self._charge_tokens(drawn_for)
        return items

    def stats(self) -> dict[str, float]:
        """Counters and gauges of requests, tokens and blocks."""
        return {
            "requests_waiting": len(self._waiting),
            "requests_running": len(self._running),
            **self._kv.stats(),
            **self._counts,
        }

    def discrepancies(self) -> list[str]:
        """Recount blocks, adapter references and queues from the requests; what is off, empty when all is well."""
        requests = list(self._requests.values())
        found = self._kv.discrepancies(requests) + self._adapters.discrepancies(requests)
        for name, listed, is_running in (("running", list(self._running), True), ("waiting", list(self._waiting), False)):
            due = {r.request_id for r in requests if (r.status is RequestStatus.RUNNING) == is_running}
            if len(listed) != len(due) or {r.request_id for r in listed} != due:
                found.append(f"{len(listed)} requests are listed as {name} and {len(due)} are")
        found += [f"request {r.request_id} has blocks and does not run" for r in self._waiting if r.block_ids]
        if not self._needed_room_since.keys() <= self._requests.keys():
            found.append("a request that ended is still waiting for room")
        return found

    # Planning

    def _continue_running(self, scheduled: list[ScheduledRequest]) -> int:
        """Deal tokens to running requests, preempting from the end of the line for blocks; the budget that is left."""
        budget, position, running, block_size = self._limits.max_num_batched_tokens, 0, self._running, self._kv.block_size
        while position < len(running) and budget > 0:
            request = running[position]
            start, num_output, block_ids = request.num_computed_tokens, len(request.output_ids), request.block_ids
            follows = False
            if request.num_ahead:
                start, num_output, follows = start + request.num_ahead, num_output + request.num_drawing, request.num_drawing > 0
                if start == len(request.prompt_ids) + num_output or (follows and num_output == request.sampling.max_tokens):
                    position += 1
                    continue  # its last step is launched already
            if start + 1 == len(request.prompt_ids) + num_output:  # as in most steps of most requests
                samples = num_output < request.sampling.max_tokens
                dealt, end = ScheduledRequest(request, start, 1, block_ids, request.adapter_index, samples, follows), start + 1
            else:
                dealt = self._deal(request, budget)
                end = start + dealt.num_tokens
            # Mostly the last block has room, and there is nothing to ask for.
            if end <= len(block_ids) * block_size or self._kv.extend(request, end):
                scheduled.append(dealt)
                budget -= end - start
                position += 1
            else:
                self._preempt(running[-1])  # stands at or behind `position`, so it is not in this plan
        return budget

    def _start_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> list[RequestId]:
        """Start requests in fair order while budget, seats and blocks last; those that never ran before are returned.

        A request whose adapter is not on the device is passed by all others. One that does not fit into the free blocks is
        passed by nobody: blocks come free as others end, and those that pass would take them for ever.
        """
        newly_running: list[RequestId] = []
        if not self._is_pass_unfinished:
            self._waiting.unpark()
            self._is_draining = False
        self._is_pass_unfinished = False
        if budget <= 0 or len(self._running) >= self._limits.max_num_seqs or not len(self._waiting):
            return newly_running
        # With budget left every running request is in the plan; one that draws a token has all its blocks.
        reserved = sum(self._kv.num_missing(s.request) for s in scheduled if not s.samples)
        num_passed_over = 0
        while budget > 0 and len(self._running) < self._limits.max_num_seqs:
            if num_passed_over == MAX_PASSED_OVER:
                self._is_pass_unfinished = True
                break
            request = self._waiting.pop()
            if request is None:
                break
            if (self._is_draining and request.adapter_key is not None) or not self._adapters.to_device(request):
                self._pass_over(request)
                num_passed_over += 1
                continue
            if (misfit := weigh(request, self._adapters.wholes(request), self._limits)) is not None:
                self._adapters.to_host(request)
                self._waiting.park(request)
                self._fail(request, misfit.code, misfit.message)
                continue
            computed = self._kv.find_computed(request)
            if not self._kv.can_start(request, computed, reserved):
                self._adapters.to_host(request)
                self._waiting.put_back(request)
                break
            if request.status is RequestStatus.WAITING:
                newly_running.append(request.request_id)
            self._start(request, computed)
            dealt = self._deal(request, budget)
            if not self._kv.extend(request, dealt.start + dealt.num_tokens):
                raise AssertionError(f"request {request.request_id} was started without room")
            reserved += self._kv.num_missing(request)
            scheduled.append(dealt)
            budget -= dealt.num_tokens
        return newly_running

    def _deal(self, request: Request, budget: int) -> ScheduledRequest:
        """The tokens that the request computes next, as many of them as ``budget`` allows."""
        start, num_output = request.num_computed_tokens + request.num_ahead, len(request.output_ids)
        num_left = len(request.prompt_ids) + num_output - start
        num_tokens = min(num_left, budget, self._limits.prefill_chunk_size or budget)
        samples = num_tokens == num_left and num_output < request.sampling.max_tokens
        return ScheduledRequest(request, start, num_tokens, request.block_ids, request.adapter_index, samples)

    def _start(self, request: Request, computed: list[int]) -> None:
        self._kv.share(request, computed)
        request.num_computed_tokens = len(computed) * self._kv.block_size
        if request.status is RequestStatus.WAITING:  # what a preemption makes it compute again is not charged
            request.num_cached_tokens = min(request.num_computed_tokens, len(request.prompt_ids))
            cost = COST_OF_PROMPT_TOKEN * (1 + request.extra_cost)
            self._waiting.charge(request.flow, cost * (request.num_tokens - request.num_computed_tokens))
            self._counts["prompt_tokens_total"] += len(request.prompt_ids)
            self._counts["cached_tokens_total"] += request.num_cached_tokens
        self._num_adapter_starts += request.adapter_key is not None
        self._needed_room_since.pop(request.request_id, None)
        request.move_to(RequestStatus.RUNNING)
        self._running.append(request)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._kv.free(request)
        self._adapters.to_host(request)
        request.num_computed_tokens = request.num_ahead = request.num_drawing = 0
        request.prompt_logprobs = []
        request.move_to(RequestStatus.PREEMPTED)
        self._waiting.push(request)
        self._counts["preemptions_total"] += 1

    def _pass_over(self, request: Request) -> None:
        """Set aside a request whose adapter is not on the device, or fail it if it never will be.

        If it only needs room there, and as many adapter requests have passed as could run at once, no more may: running ones
        then give their adapters' room back.
        """
        self._waiting.park(request)
        if self._is_draining:
            return
        failure = self._adapters.failure(request)
        if failure is not None:
            self._fail(request, failure.code, failure.message)
        elif self._adapters.needs_room(request):
            since = self._needed_room_since.setdefault(request.request_id, self._num_adapter_starts)
            self._is_draining = self._num_adapter_starts - since >= self._limits.max_num_seqs

    # Ending

    def _charge_tokens(self, drawn_for: Sequence[Request]) -> None:
        """Charge a drawn token to the flow of each of these requests."""
        for flow, number in Counter([request.flow for request in drawn_for]).items():
            self._waiting.charge(flow, COST_OF_OUTPUT_TOKEN * number)
        for request in [request for request in drawn_for if request.extra_cost]:
            self._waiting.charge(request.flow, COST_OF_OUTPUT_TOKEN * request.extra_cost)
        self._counts["output_tokens_total"] += len(drawn_for)

    def _take_token(self, request: Request, result: RequestResult) -> OutItem:
        """Take in the token that was drawn, and end the request if that was the last."""
        if result.token_id is None:
            raise AssertionError(f"the step drew no token for request {request.request_id}")
        index = len(request.output_ids)
        prompt_logprobs = None if request.sampling.prompt_logprobs is None else due_prompt_logprobs(request)
        request.output_ids.append(result.token_id)
        reason = finish_reason(request)
        if reason is not None:
            self._end(request)
        return OutItem(
            request.request_id,
            index,
            [result.token_id],
            None if result.logprob is None else [result.logprob],
            prompt_logprobs,
            None if reason is None else reason.value,
            None,
            request.num_cached_tokens if index == request.num_resumed_tokens else 0,
        )

    def _end_without_token(self, request: Request) -> OutItem:
        """The request was for no token but its prompt's logprobs, which are complete."""
        item = OutItem(
            request.request_id,
            request.num_output_tokens,
            prompt_logprobs=due_prompt_logprobs(request),
            finish=FinishReason.LENGTH.value,
            cached_tokens=request.num_cached_tokens,
        )
        self._end(request)
        return item

    def _fail_expired(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.order == order:
                seconds, status = now - request.arrival, request.status.value
                made = f"{request.num_output_tokens} of at most {request.sampling.max_tokens} tokens"
                self._fail(request, ErrorCode.TIMEOUT, f"the time limit passed after {seconds:.1f} s; it was {status}, with {made}")

    def _fail_in_step(self, request: Request, failure: EngineError) -> OutItem:
        """The runner could make nothing of it. What gave NaN must not be found by the next request with this prompt."""
        if failure.code == ErrorCode.NON_FINITE:
            self._kv.withdraw(request)
        return self._end_with(request, failure)

    def _fail(self, request: Request, code: str, message: str) -> None:
        self._ended.append(self._end_with(request, EngineError(str(code), message)))

    def _end_with(self, request: Request, error: EngineError) -> OutItem:
        self._end(request)
        return OutItem(request.request_id, request.num_output_tokens, finish=FinishReason.ERROR.value, error=error)

    def _end(self, request: Request) -> None:
        """The one way out: whatever the request holds is given back."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._kv.free(request)
        self._adapters.let_go(request)
        request.move_to(RequestStatus.FINISHED)
        del self._requests[request.request_id]
        self._needed_room_since.pop(request.request_id, None)
