"""Arrays and their mirror, by way of a device that copies as late as it may."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_twins import LateLink

from graftwork_engine.step_io import MirrorIo

CPU = torch.device("cpu")


def test_what_was_sent_arrives_though_the_arrays_have_been_written_since() -> None:
    """The device is a step behind: it reads what stood there when the step was sent."""
    link = LateLink()
    io = MirrorIo(4096, CPU, link)
    numbers = io.array(5, np.int64)
    mirror, seen = io.tensor(numbers), []
    for step in range(6):
        numbers[:] = step
        io.send(numbers)
        if step:
            link.run(step)  # the one before this one
            seen.append(mirror.tolist())
    assert seen == [[step] * 5 for step in range(5)]


def test_a_piece_of_pinned_memory_is_not_written_before_it_was_read() -> None:
    """Nobody waits for results: the third step waits for the first to be read."""
    link = LateLink()
    io = MirrorIo(4096, CPU, link)
    numbers = io.array(5, np.int64)
    for step in range(7):
        numbers[:] = step
        io.send(numbers)
        assert len(link.waiting) <= 2
        assert all(len(set(source.view(torch.int64)[:5].tolist())) == 1 for _, source in link.waiting)
    sent = [source.view(torch.int64)[0].item() for _, source in link.waiting]
    assert sent == [5, 6]


def test_results_are_there_after_the_wait_and_not_before() -> None:
    link = LateLink()
    io = MirrorIo(64, CPU, link)
    wait = io.fetch([torch.tensor([1.5, 2.5]), torch.tensor([True])])
    assert link.num_done == 0
    floats, booleans = wait()
    assert (floats.tolist(), booleans.tolist()) == ([1.5, 2.5], [True])


def test_results_do_not_wait_for_later_steps() -> None:
    link = LateLink()
    io = MirrorIo(64, CPU, link)
    numbers = io.array(4, np.int32)
    wait = io.fetch([torch.tensor([1])])
    io.send(numbers)
    wait()
    assert len(link.waiting) == 1


def test_single_entries_are_brought_and_no_others() -> None:
    link = LateLink()
    io = MirrorIo(4096, CPU, link)
    table = io.array(12, np.int32).reshape(3, 4)
    table[:] = np.arange(12).reshape(3, 4)
    entries = []

    def copy_now(destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)
        entries.append(source.tolist())

    link.copy = copy_now  # type: ignore[method-assign]
    io.send_entries(table, np.array([5, 11]))
    assert io.tensor(table).tolist() == [[0, 0, 0, 0], [0, 5, 0, 0], [0, 0, 0, 11]]
    assert sorted(map(tuple, entries)) == [(5, 11), (5, 11)]


def test_a_tensor_is_a_contiguous_part() -> None:
    io = MirrorIo(4096, CPU, LateLink())
    numbers = io.array(8, np.int64)
    assert io.tensor(numbers[2:5]).shape == (3,)
    with pytest.raises(ValueError, match="contiguous"):
        io.tensor(numbers[::2])
