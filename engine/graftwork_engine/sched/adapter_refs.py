"""The one place where a request takes and gives back references to its adapter. Refuses to know what an adapter is.

status       reference      takes          gives back
WAITING      host           hold           let_go
RUNNING      device         to_device      let_go
PREEMPTED    host           to_host        let_go
FINISHED     none

A step that was launched reads its adapters until its results are there, whatever becomes of its requests meanwhile: a reference on
the device that is given back in that time is kept until then.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from graftwork_adapters.wholes import WholeFacts
from graftwork_engine.request import Request, RequestStatus
from graftwork_engine.sched.plan import BASE, AdapterFailure, AdapterGate


class AdapterRefs:
    """Keeps each request at exactly one reference, and books of them to check. Requests without an adapter have none."""

    def __init__(self, gate: AdapterGate) -> None:
        self._gate = gate
        self._host: Counter[str] = Counter()
        self._device: Counter[str] = Counter()
        self._leaving: deque[tuple[int, str]] = deque()  # given back, with the last step that may read the adapter
        self._num_launched = 0
        self._num_retired = 0

    def launch(self) -> None:
        """A step begins whose results are taken in later."""
        self._num_launched += 1

    def retire(self) -> None:
        """The oldest of those steps is through; nothing happens where there is none."""
        self._num_retired = min(self._num_retired + 1, self._num_launched)
        while self._leaving and self._leaving[0][0] <= self._num_retired:
            self._release_now(self._leaving.popleft()[1])

    def hold(self, request: Request) -> None:
        """A request arrives: its adapter starts on its way to the host and stays there."""
        if request.adapter_key is not None:
            self._gate.hold(request.adapter_key)
            self._host[request.adapter_key] += 1

    def to_device(self, request: Request) -> bool:
        """Exchange the host reference for one on the device and note the index; False while the adapter is not there."""
        key = request.adapter_key
        if key is None:
            return True
        index = self._gate.acquire(key)
        if index is None:
            return False
        self._device[key] += 1
        self._drop(key)
        request.adapter_index = index
        return True

    def wholes(self, request: Request) -> WholeFacts | None:
        """What its adapter brings whole, now that it has its device reference; None if that is nothing."""
        return None if request.adapter_key is None else self._gate.wholes(request.adapter_index)

    def to_host(self, request: Request) -> None:
        """Exchange the device reference for one on the host. That comes first, so that the adapter cannot leave between the two."""
        self.hold(request)
        self._release(request)

    def let_go(self, request: Request) -> None:
        """A request ends: give back what its status says it holds. Called before the status becomes FINISHED."""
        if request.status is RequestStatus.RUNNING:
            self._release(request)
        elif request.adapter_key is not None:
            self._drop(request.adapter_key)

    def failure(self, request: Request) -> AdapterFailure | None:
        """Why the request's adapter cannot be loaded, if it cannot."""
        return None if request.adapter_key is None else self._gate.failure(request.adapter_key)

    def needs_room(self, request: Request) -> bool:
        """True while the adapters of running requests keep this request's from the device."""
        return request.adapter_key is not None and self._gate.needs_room(request.adapter_key)

    def discrepancies(self, requests: Iterable[Request]) -> list[str]:
        """What is wrong with these books and with the gate's, given all unfinished requests; empty when all is well."""
        host: Counter[str] = Counter()
        device: Counter[str] = Counter()
        for request in requests:
            if request.adapter_key is not None:
                (device if request.status is RequestStatus.RUNNING else host)[request.adapter_key] += 1
        device.update(key for _, key in self._leaving)
        found = []
        for name, booked, due in (("host", self._host, host), ("device", self._device, device)):
            found += [
                f"adapter {key} has {booked[key]} {name} references and {due[key]} requests or steps that hold it there"
                for key in sorted(booked.keys() | due.keys())
                if booked[key] != due[key]
            ]
        return found + self._gate.discrepancies(host, device)

    def _drop(self, key: str) -> None:
        self._gate.drop(key)
        self._host[key] -= 1
        if not self._host[key]:
            del self._host[key]

    def _release(self, request: Request) -> None:
        key = request.adapter_key
        request.adapter_index = BASE
        if key is None:
            return
        if self._num_retired == self._num_launched:
            self._release_now(key)
        else:
            self._leaving.append((self._num_launched, key))

    def _release_now(self, key: str) -> None:
        self._gate.release(key)
        self._device[key] -= 1
        if not self._device[key]:
            del self._device[key]
