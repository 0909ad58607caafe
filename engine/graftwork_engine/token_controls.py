"""What a request's controls say about single tokens, in flat arrays beside the request. Knows no tensors and no vocabulary.

Both are made when a step first needs them and then kept: a step's work goes with the tokens that are new, not with the history.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence


class TokenCounts:
    """How often the output holds each token; ``prompt_ids``, where they matter, stand beside it with what the output has of them.

    ``token_ids`` and ``counts`` are int32, one entry for each distinct token, in the order in which tokens were first met. Both
    grow in place.
    """

    __slots__ = ("_num_counted", "_place", "counts", "token_ids")

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        self._place = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._num_counted = 0
        self.token_ids = array("i", self._place)
        self.counts = array("i", [0]) * len(self._place)

    def catch_up(self, output_ids: Sequence[int]) -> None:
        """Count the output from where the last call ended; output is only ever added to."""
        num_counted = self._num_counted
        if len(output_ids) == num_counted + 1:  # as after most steps: no list is made for it
            self._count(output_ids[num_counted])
        else:
            for token_id in output_ids[num_counted:]:
                self._count(token_id)
        self._num_counted = len(output_ids)

    def _count(self, token_id: int) -> None:
        place = self._place.get(token_id)
        if place is None:
            self._place[token_id] = len(self.token_ids)
            self.token_ids.append(token_id)
            self.counts.append(1)
        else:
            self.counts[place] += 1


class TokenBias:
    """What is added to the logits of single tokens: ``token_ids`` int32, distinct, ``values`` fp32, -inf for ``banned`` ones."""

    def __init__(self, bias: Mapping[int, float], banned: Iterable[int]) -> None:
        merged = {**bias, **dict.fromkeys(banned, float("-inf"))}
        self.token_ids = array("i", merged)
        self.values = array("f", merged.values())
