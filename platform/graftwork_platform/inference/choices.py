"""The choices of one request: which engine request each of them is, when it may start, and its output. Knows no engine."""

from __future__ import annotations

import msgspec

from graftwork_engine.messages import OutItem, TokenLogprob
from graftwork_platform.inference.admission import Admitted
from graftwork_platform.inference.output import Delta, OutputText


class Choices:
    """Choice ``i · n + j`` is the j-th of prompt i; those of one prompt differ by their noise alone.

    A prompt's first choice leads: its prompt is computed, and its log-probabilities are those of the others as well.
    """

    def __init__(self, admitted: Admitted) -> None:
        self._n = admitted.n
        self._indices = {admitted.engine_id(index): index for index in range(admitted.num_choices)}
        self._prompt_logprobs: dict[int, list[TokenLogprob | None] | None] = {}
        self._outputs = [_output(admitted, index) for index in range(admitted.num_choices)]

    def leaders(self) -> range:
        """The choices that start at once."""
        return range(0, len(self._outputs), self._n)

    def followers(self, index: int) -> range:
        """The choices that may start when choice ``index`` has begun; none behind one that follows itself."""
        return range(index + 1, index + self._n) if index % self._n == 0 else range(0)

    def num_tokens(self, index: int) -> int:
        """Output tokens of one choice so far."""
        return self._outputs[index].num_tokens

    def take(self, item: OutItem) -> Delta:
        """The next item of any choice."""
        index = self._indices[item.request_id]
        leader = index - index % self._n
        if index == leader:
            if item.prompt_logprobs is not None:
                self._prompt_logprobs[leader] = item.prompt_logprobs
        else:
            item = msgspec.structs.replace(item, prompt_logprobs=self._prompt_logprobs.get(leader))
        return self._outputs[index].take(item)


def _output(admitted: Admitted, index: int) -> OutputText:
    if not admitted.echo:
        return OutputText(admitted.tokenizer, admitted.stop, index=index)
    prompt = admitted.prompt_of(index)
    return OutputText(admitted.tokenizer, admitted.stop, echo=prompt.ids, echo_text=prompt.text, index=index)
