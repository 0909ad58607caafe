"""The reader's end of streams: what waits comes as one item, in order, and whatever ends a request otherwise stands alone."""

from __future__ import annotations

import asyncio

import pytest

from graftwork_engine.errors import ErrorCode, RequestFailed
from graftwork_engine.messages import EngineError, OutItem, Sampling, TokenLogprob
from graftwork_engine.streams import MERGED_TOKENS, GenerationRequest, Inbox, StreamGroup


def request_of(name: str) -> GenerationRequest:
    return GenerationRequest(name, [1], Sampling(max_tokens=9, seed=1), b"salt", "flow")


async def read_all(items: list[OutItem], *names: str) -> list[OutItem]:
    """All that a reader gets of these requests, whose items were there before it looked."""
    inboxes: list[Inbox] = []

    async def begin(_request: GenerationRequest, inbox: Inbox) -> None:
        inboxes.append(inbox)

    async def abort(_request_id: str, _output_index: int | None) -> None:
        pass

    async with StreamGroup(begin, abort) as group:
        for name in names:
            await group.add(request_of(name))
        for item in items:
            inboxes[0].put(item)
        return [item async for item in group]


def test_neighbours_of_one_request_come_as_one() -> None:
    entries = [TokenLogprob(-float(place)) for place in range(4)]
    items = [OutItem("a", place, [10 + place], [entries[place]], cached_tokens=5 if place == 0 else 0) for place in range(3)]
    [merged] = asyncio.run(read_all([*items, OutItem("a", 3, [13], [entries[3]], finish="length")], "a"))
    assert merged == OutItem("a", 0, [10, 11, 12, 13], entries, finish="length", cached_tokens=5)


def test_prompt_logprobs_are_kept_wherever_they_came() -> None:
    scored = OutItem("a", 0, [], prompt_logprobs=[None, TokenLogprob(-1.0)])
    [merged] = asyncio.run(read_all([scored, OutItem("a", 0, [1]), OutItem("a", 1, [2], finish="stop")], "a"))
    assert (merged.prompt_logprobs, merged.token_ids, merged.logprobs) == (scored.prompt_logprobs, [1, 2], None)


def test_other_requests_stay_others_and_keep_the_order() -> None:
    items = [OutItem("a", 0, [1]), OutItem("b", 0, [2]), OutItem("b", 1, [3]), OutItem("a", 1, [4], finish="stop")]
    read = asyncio.run(read_all([*items, OutItem("b", 2, [5], finish="stop")], "a", "b"))
    assert [(item.request_id, item.token_ids) for item in read] == [("a", [1]), ("b", [2, 3]), ("a", [4]), ("b", [5])]


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_tokens_before_a_bad_end_are_not_lost_in_it(finish: str) -> None:
    error = EngineError(ErrorCode.POISONED, "crashed twice") if finish == "error" else None
    seen = []

    async def main() -> None:
        inboxes: list[Inbox] = []

        async def begin(_request: GenerationRequest, inbox: Inbox) -> None:
            inboxes.append(inbox)

        async def abort(_request_id: str, _output_index: int | None) -> None:
            pass

        async with StreamGroup(begin, abort) as group:
            await group.add(request_of("a"))
            for item in (OutItem("a", 0, [1]), OutItem("a", 1, [2]), OutItem("a", 2, finish=finish, error=error)):
                inboxes[0].put(item)
            seen.extend([item async for item in group] if error is None else [await anext(group)])
            if error is not None:
                with pytest.raises(RequestFailed, match="crashed twice"):
                    await anext(group)

    asyncio.run(main())
    assert seen[0] == OutItem("a", 0, [1, 2])
    assert [item.finish for item in seen[1:]] == (["abort"] if error is None else [])


def test_no_item_grows_without_bound() -> None:
    count = 5 * MERGED_TOKENS
    items = [OutItem("a", place, [place], finish="length" if place + 1 == count else None) for place in range(count)]
    read = asyncio.run(read_all(items, "a"))
    assert [token_id for item in read for token_id in item.token_ids] == list(range(count))
    assert max(len(item.token_ids) for item in read) == MERGED_TOKENS
    assert [item.first_output_index for item in read] == list(range(0, count, MERGED_TOKENS))


def test_a_reader_that_gave_up_leaves_an_inbox_that_works() -> None:
    async def main() -> OutItem:
        inbox = Inbox()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await inbox.arrival()
        inbox.put(OutItem("a", 0, [1]))
        return inbox.take()

    assert asyncio.run(main()).token_ids == [1]
