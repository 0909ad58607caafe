"""Which rows of a step have an adapter that brings tensors whole: one group for each such adapter. Knows no requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graftwork_adapters.whole_memory import DeviceWholes
from graftwork_engine.model.wholes import WholeGroup, is_of_head
from graftwork_engine.sampler import SCORED_ROWS_AT_ONCE

Groups = tuple[WholeGroup, ...]


@dataclass(frozen=True, slots=True)
class StepWholes:
    """The groups of a step: ``forward`` of its rows, with what is not of the head alone; ``drawn`` of the rows that draw a token
    and ``scored`` of those that score the prompt, as many at a time as those are scored, with what is of the head.

    ``num_logits``: the most tokens that an adapter of the step knows, 0 where all have the base's vocabulary.
    """

    forward: Groups = ()
    drawn: Groups = ()
    scored: tuple[Groups, ...] = ()
    num_logits: int = 0


NO_WHOLES = StepWholes()
"""Of a step without such adapters: of most."""


class WholeRows:
    """Looks up in ``wholes`` what each adapter brings, by index. ``upload`` brings numbers of rows to where the operators run."""

    def __init__(self, wholes: Mapping[int, DeviceWholes], upload: Callable[[Tensor], Tensor]) -> None:
        self._wholes, self._upload = wholes, upload

    def group(
        self,
        adapters: npt.NDArray[np.int32],
        token_adapter: npt.NDArray[np.int32],
        drawn_rows: npt.NDArray[np.int64],
        scored_rows: npt.NDArray[np.int64] | None,
    ) -> StepWholes:
        """The groups of a step whose requests have ``adapters`` int32 [R] and whose rows have ``token_adapter`` int32 [T]."""
        brought = {index: self._wholes[index] for index in np.unique(adapters).tolist() if index in self._wholes}
        if not brought:
            return NO_WHOLES
        in_head = {index: whole.tensors for index, whole in brought.items() if any(map(is_of_head, whole.tensors))}
        elsewhere = {index: whole.tensors for index, whole in brought.items() if not all(map(is_of_head, whole.tensors))}
        scored = np.zeros(0, dtype=np.int64) if scored_rows is None else scored_rows
        return StepWholes(
            self._groups(elsewhere, token_adapter),
            self._groups(in_head, token_adapter[drawn_rows]),
            tuple(
                self._groups(in_head, token_adapter[scored[start : start + SCORED_ROWS_AT_ONCE]])
                for start in range(0, len(scored), SCORED_ROWS_AT_ONCE)
            ),
            max(whole.facts.vocab_size or 0 for whole in brought.values()),
        )

    def _groups(self, brought: Mapping[int, Mapping[str, Tensor]], row_adapter: npt.NDArray[np.int32]) -> Groups:
        groups = []
        for index, tensors in brought.items():
            rows = np.flatnonzero(row_adapter == index)  # none, where its adapter begins later
            if len(rows):
                groups.append(WholeGroup(self._upload(torch.from_numpy(rows)), tensors))
        return tuple(groups)
