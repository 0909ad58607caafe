"""The compiled library seen from Python: its operators as addresses, and the one call that runs a list of them."""

from __future__ import annotations

import ctypes
import logging
import tempfile
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

from graftwork_kernels.cpu.build import SOURCES, CacheUnusable, KernelsUnavailable, build_library

logger = logging.getLogger(__name__)


class Step(ctypes.Structure):
    """`Step` of step.h: what a step decides. ``fault`` is 0, or the first `Fault` that an operator met."""

    _fields_ = (("num_rows", ctypes.c_int64), ("num_requests", ctypes.c_int64), ("fault", ctypes.c_int64))


class Command(ctypes.Structure):
    """`Command` of step.h: an operator's address and that of its arguments."""

    _fields_ = (("call", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class Fault(IntEnum):
    """Why an operator stopped reading."""

    ADAPTER_OUTSIDE = 1
    ROW_OUTSIDE = 2
    POSITION_OUTSIDE = 3
    SLOT_OUTSIDE = 4
    CONTEXT_OUTSIDE = 5
    NO_ROOM = 6


FAULTS: Mapping[Fault, str] = {
    Fault.ADAPTER_OUTSIDE: "batch.token_adapter: a row names an adapter that is not among those in memory.sites",
    Fault.ROW_OUTSIDE: "memory.sites: a record names rows that lie outside memory.row_offset or memory.pool",
    Fault.POSITION_OUTSIDE: "a position or a token id lies beyond its table",
    Fault.SLOT_OUTSIDE: "kv_slot: a slot lies beyond the cache",
    Fault.CONTEXT_OUTSIDE: "batch: a request's rows, context or blocks lie beyond the step's rows, its block table or the cache",
    Fault.NO_ROOM: "an operator needs more memory to work in than it was given: its two halves are not of one version",
}


class Library:
    """Raises ValueError for an operator that the library does not have, or whose arguments it lays out in another way.

    ``fingerprint`` tells it from any that was compiled from other sources, otherwise, or for another machine.
    """

    def __init__(self, path: Path) -> None:
        self.fingerprint = path.stem
        self._library = ctypes.CDLL(str(path))
        self._run = self._library.graftwork_run
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32)
        self._run.restype = None
        self._addresses: dict[tuple[str, type[ctypes.Structure]], int] = {}

    def address(self, operator: str, arguments: type[ctypes.Structure]) -> int:
        """Where ``operator`` begins."""
        address = self._addresses.get((operator, arguments))
        if address is None:
            address = self._addresses[operator, arguments] = self._find(operator, arguments)
        return address

    def _find(self, operator: str, arguments: type[ctypes.Structure]) -> int:
        try:
            function = getattr(self._library, operator)
            size = ctypes.c_int64.in_dll(self._library, f"{operator}_argument_bytes").value
        except (AttributeError, ValueError) as error:
            raise ValueError(f"the compiled library has no operator {operator}") from error
        if size != ctypes.sizeof(arguments):
            raise ValueError(f"{operator}: the library's arguments take {size} bytes, Python's {ctypes.sizeof(arguments)}")
        address = ctypes.cast(function, ctypes.c_void_p).value
        if address is None:
            raise ValueError(f"the compiled library has no operator {operator}")
        return address

    def run(self, commands: ctypes.Array[Command], step: Step, num_threads: int) -> None:
        """Run all commands; raises IndexError for what an operator refused to read."""
        step.fault = 0
        self._run(ctypes.addressof(commands), len(commands), ctypes.addressof(step), num_threads)
        if step.fault:
            raise IndexError(FAULTS[Fault(step.fault)])


def open_library(cache_dir: Path, sources: Path = SOURCES) -> Library:
    """The operators for this machine, compiled into ``cache_dir`` the first time; raises `KernelsUnavailable`.

    Where nothing can be kept there, or nothing loaded from there, they are compiled for this process alone.
    """
    try:
        return Library(build_library(cache_dir, sources))
    except (CacheUnusable, OSError) as error:
        logger.warning("the kernels are compiled anew at every start: %s", error)
    with tempfile.TemporaryDirectory(prefix="graftwork-kernels-") as folder:
        try:
            return Library(build_library(Path(folder), sources))  # once it is loaded, its file is not needed
        except OSError as error:
            raise KernelsUnavailable(f"the compiled kernels cannot be loaded: {error}") from error
