"""Records the commands of a forward pass once and runs them again each step, as a captured graph does on a GPU.

Recording hands out memory for results that is never written; `Recorder.finish` then sees which command uses which result last, lets
results that never live together share memory, and points the commands there. A step is one call with two numbers.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftwork_kernels.cpu.library import Command, Library, Step

ALIGNMENT = 64
"""Bytes: a cache line."""


@dataclass(slots=True)
class _Result:
    """Memory that a recorded command asked for, and the commands that name it: first and last, by number."""

    tensor: Tensor
    first: int = -1
    last: int = -1
    offset: int = 0

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True, slots=True)
class _Recorded:
    call: int
    arguments: ctypes.Structure
    num_rows: int
    num_requests: int | None


class Program:
    """A recorded forward pass. ``outputs`` are the tensors that were named as such, at the capacity of the largest step.

    ``max_rows`` and ``max_requests`` are the largest step that all of its commands have memory for; None if none looks at it.
    """

    def __init__(
        self, library: Library, num_threads: int, recorded: Sequence[_Recorded], kept: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        self._library, self._num_threads = library, num_threads
        self._recorded, self._kept = tuple(recorded), tuple(kept)  # the commands point into both
        self._commands = (Command * len(recorded))(*(Command(r.call, ctypes.addressof(r.arguments)) for r in recorded))
        self._step = Step()
        self.max_rows = min((r.num_rows for r in recorded), default=None)
        self.max_requests = min((r.num_requests for r in recorded if r.num_requests is not None), default=None)
        self.outputs = tuple(outputs)

    def __len__(self) -> int:
        """Commands of one run."""
        return len(self._recorded)

    def run(self, num_rows: int, num_requests: int = 0) -> None:
        """Compute a step of so many rows and requests from what now lies in the tensors that were recorded with.

        Raises ValueError for a step that the tensors have no room for. What `outputs` hold beyond the step's rows is undefined.
        """
        _check_size("rows", num_rows, self.max_rows)
        _check_size("requests", num_requests, self.max_requests)
        self._step.num_rows, self._step.num_requests = num_rows, num_requests
        self._library.run(self._commands, self._step, self._num_threads)


class Recorder:
    """An `graftwork_kernels.cpu.issue.Issuer` that keeps commands instead of running them."""

    def __init__(self, library: Library, num_threads: int | None = None) -> None:
        self.library = library
        self.num_threads = num_threads or torch.get_num_threads()
        self._recorded: list[_Recorded] = []
        self._results: list[_Result] = []
        self._kept: list[Tensor] = []

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """See `graftwork_kernels.cpu.issue.Issuer`."""
        tensor = torch.empty(shape, dtype=dtype)
        self._results.append(_Result(tensor))
        return tensor

    def now(self, operator: str, arguments: ctypes.Structure) -> None:
        """See `graftwork_kernels.cpu.issue.Issuer`."""
        command = Command(self.library.address(operator, type(arguments)), ctypes.addressof(arguments))
        self.library.run((Command * 1)(command), Step(), self.num_threads)

    def compute(self, what: str) -> None:
        """See `graftwork_kernels.cpu.issue.Issuer`: nothing can be computed yet."""
        raise ValueError(f"{what} cannot be recorded: it computes at once, from results that are not there yet")

    def issue(
        self, operator: str, arguments: ctypes.Structure, tensors: Sequence[Tensor], num_rows: int, num_requests: int | None = None
    ) -> None:
        """See `graftwork_kernels.cpu.issue.Issuer`; the two numbers are the most that a step may have when the program is run."""
        self._recorded.append(_Recorded(self.library.address(operator, type(arguments)), arguments, num_rows, num_requests))
        self._kept.extend(tensors)

    def finish(self, *outputs: Tensor) -> Program:
        """The program of all commands so far. ``outputs``, results or views of them, survive to its end. Call once."""
        results = sorted((r for r in self._results if r.tensor.numel()), key=lambda result: result.address)
        addresses = [result.address for result in results]

        def owner(address: int | None) -> _Result | None:
            place = bisect_right(addresses, address or 0) - 1
            found = results[place] if place >= 0 else None
            return found if found is not None and (address or 0) < found.address + found.num_bytes else None

        pointers = [(number, *field) for number, recorded in enumerate(self._recorded) for field in _pointers(recorded.arguments)]
        for number, arguments, name in pointers:
            result = owner(getattr(arguments, name))
            if result is not None:
                result.first = number if result.first < 0 else result.first
                result.last = number
        for output in outputs:
            result = owner(output.data_ptr())
            if result is None:
                raise ValueError("finish: an output that no recorded command made")
            result.last = len(self._recorded)
        arena = torch.empty(_share_memory(self._results), dtype=torch.uint8)

        def moved(address: int, result: _Result) -> int:
            return arena.data_ptr() + result.offset + address - result.address

        for _, arguments, name in pointers:
            address = getattr(arguments, name)
            result = owner(address)
            if result is not None:
                setattr(arguments, name, moved(address, result))
        placed = [_placed(output, arena, owner(output.data_ptr())) for output in outputs]
        own = {id(result.tensor) for result in results}
        kept = [tensor for tensor in self._kept if id(tensor) not in own and owner(tensor.data_ptr()) is None]
        return Program(self.library, self.num_threads, self._recorded, [*kept, arena], placed)


def _check_size(what: str, number: int, limit: int | None) -> None:
    if number < 0 or (limit is not None and number > limit):
        most = "any number" if limit is None else f"0 to {limit}"
        raise ValueError(f"run: expected {most} of {what}, as the program was recorded for, got {number}")


def _pointers(arguments: ctypes.Structure) -> Iterator[tuple[ctypes.Structure, str]]:
    """Every pointer of ``arguments``, those of structures within it too: whose field it is, and the field's name."""
    for name, kind, *_ in arguments._fields_:
        if kind is ctypes.c_void_p:
            yield arguments, name
        elif issubclass(kind, ctypes.Structure):
            yield from _pointers(getattr(arguments, name))


def _share_memory(results: Sequence[_Result]) -> int:
    """Give each result the lowest offset at which no other lies while it lives; the bytes that all need together."""
    placed: list[_Result] = []
    total = 1
    for result in sorted((r for r in results if r.first >= 0), key=lambda r: (r.first, -r.num_bytes)):
        size = -(-result.num_bytes // ALIGNMENT) * ALIGNMENT
        offset = 0
        for other in sorted((p for p in placed if p.last >= result.first and p.first <= result.last), key=lambda p: p.offset):
            if offset + size <= other.offset:
                break
            offset = max(offset, -(-(other.offset + other.num_bytes) // ALIGNMENT) * ALIGNMENT)
        result.offset = offset
        placed.append(result)
        total = max(total, offset + size)
    return total


def _placed(output: Tensor, arena: Tensor, result: _Result | None) -> Tensor:
    """``output`` where its memory now lies."""
    if result is None:
        raise ValueError("finish: an output that no recorded command made")
    start = (result.offset + output.data_ptr() - result.address) // output.element_size()
    whole = arena[: arena.numel() // output.element_size() * output.element_size()].view(output.dtype)
    return whole.as_strided(output.shape, output.stride(), whole.storage_offset() + start)
