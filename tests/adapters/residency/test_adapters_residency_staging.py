"""The way to a device by staging buffers: the device here makes its copies as late as it may, so a buffer that is written too
early spoils bytes that are compared."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork_adapters.device_copy import Copier, CudaStream, HostCopier, StagedCopier, copier_for
from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.errors import AdapterTooLarge
from graftwork_adapters.fetcher import HostAdapter

BUFFER = 64


class LazyStream:
    """Makes a copy when somebody waits for it or for a later one, and not before; or earlier, when told to."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_sent = self.num_made = 0
        self.num_buffers = 0

    def staging_buffer(self, num_bytes: int) -> torch.Tensor:
        self.num_buffers += 1
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def send(self, destination: torch.Tensor, source: torch.Tensor) -> LazyCopy:
        assert len(destination) == len(source) > 0
        self.queue.append((destination, source))
        self.num_sent += 1
        return LazyCopy(self, self.num_sent)

    def make(self, up_to: int) -> None:
        while self.num_made < up_to:
            destination, source = self.queue.pop(0)
            destination.copy_(source)
            self.num_made += 1


class LazyCopy:
    def __init__(self, stream: LazyStream, number: int) -> None:
        self.stream, self.number = stream, number

    def synchronize(self) -> None:
        self.stream.make(self.number)


SIZES = [0, 1, BUFFER - 1, BUFFER, BUFFER + 1, 2 * BUFFER, 3 * BUFFER + 7, 5 * BUFFER]


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_a_copy_of_any_size_arrives_with_finish(size: int, num_buffers: int) -> None:
    stream = LazyStream()
    copier = StagedCopier(stream, BUFFER, num_buffers)
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    destination, expected = torch.zeros(size + 2, dtype=torch.uint8), source.copy()
    copier.copy(destination[1 : size + 1], source)
    source[:] = 0  # the caller's own again
    copier.finish()
    assert destination[1 : size + 1].numpy().tobytes() == expected.tobytes()
    assert destination[[0, -1]].tolist() == [0, 0]
    assert not stream.queue
    assert stream.num_buffers == num_buffers


steps = st.lists(
    st.one_of(
        st.tuples(st.just("copy"), st.one_of(st.sampled_from(SIZES), st.integers(0, 4 * BUFFER)), st.integers(0, 200)),
        st.tuples(st.just("finish"), st.just(0), st.just(0)),
        st.tuples(st.just("device works"), st.integers(1, 4), st.just(0)),
    ),
    max_size=40,
)


@given(steps, st.integers(1, 4))
def test_no_buffer_is_written_before_its_copies_are_made(steps, num_buffers: int) -> None:
    """In any order of copies, to places that overlap too: the device holds what copies made one after the other would leave."""
    stream = LazyStream()
    copier = StagedCopier(stream, BUFFER, num_buffers)
    device, expected = torch.zeros(600, dtype=torch.uint8), np.zeros(600, dtype=np.uint8)
    generator = np.random.default_rng(len(steps))
    for what, size, place in steps:
        if what == "copy":
            source = generator.integers(0, 256, size, dtype=np.uint8)
            expected[place : place + size] = source
            copier.copy(device[place : place + size], source)
            source[:] = 0
        elif what == "finish":
            copier.finish()
            assert not stream.queue
            assert np.array_equal(device.numpy(), expected)
        else:
            stream.make(min(stream.num_made + size, stream.num_sent))
    copier.finish()
    assert np.array_equal(device.numpy(), expected)


def test_the_device_is_waited_for_only_when_the_ring_is_full() -> None:
    stream = LazyStream()
    copier = StagedCopier(stream, BUFFER, 3)
    for number in range(6):
        copier.copy(torch.zeros(BUFFER // 2, dtype=torch.uint8), np.zeros(BUFFER // 2, dtype=np.uint8))
        assert (stream.num_sent, stream.num_made) == (number + 1, 0)
    copier.copy(torch.zeros(1, dtype=torch.uint8), np.zeros(1, dtype=np.uint8))
    assert stream.num_made == 2, "the two copies of the first buffer"
    copier.finish()
    assert stream.num_made == 7


@pytest.mark.parametrize("copier", [HostCopier(), StagedCopier(LazyStream(), BUFFER)], ids=["host", "staged"])
def test_tables_go_as_the_bytes_they_are(copier) -> None:
    table = np.arange(60, dtype=np.int64).reshape(10, 6)
    destination = torch.zeros(3, 10, 6, dtype=torch.int64)
    copier.copy(destination[1], table)
    copier.copy(destination[2, 0:0], table[0:0])
    copier.finish()
    assert torch.equal(destination[1], torch.from_numpy(table))
    assert not destination[[0, 2]].any()
    with pytest.raises(AssertionError, match="480 bytes are to be copied to 432"):
        copier.copy(destination[1, 1:], table)


def exercise(host: DevicePool, staged: DevicePool, adapters, seed: int, num_steps: int) -> None:
    """The same random loads and evictions on two pools, which must end up with the same bytes after each."""
    choose = random.Random(seed)
    live: list = []
    for _ in range(num_steps):
        if live and choose.random() < 0.4:
            index = live.pop(choose.randrange(len(live)))
            for pool in (host, staged):
                pool.free(index)
                pool.clear([index.index])
        else:
            packed = choose.choice(adapters)
            try:
                layout = host.plan(packed.index)
            except AdapterTooLarge:
                continue
            placement = host.place(layout.extent)
            assert staged.place(layout.extent) == placement
            if placement is None:
                continue
            for pool in (host, staged):
                pool.write(placement, layout, HostAdapter(packed.index, packed.rows))
            live.append(placement)
        for mine, other in zip(host.tensors, staged.tensors, strict=True):
            assert torch.equal(mine, other.cpu())


def some_adapters(packed_of) -> list:
    shapes = [(0, 1, 0, 0), (2, 0, 3, 1), (5, 5, 5, 5), (0, 0, 0, 0)]
    sized = [packed_of(f"sized {n}", num_bytes=n * 512) for n in (1, 3, 6)]
    return [packed_of(f"adapter {n}", ranks) for n, ranks in enumerate(shapes)] + sized


@pytest.mark.parametrize("buffer_bytes", [64, 192, 1 << 16])
def test_a_pool_by_way_of_staging_holds_what_one_on_the_host_holds(packed_of, buffer_bytes: int) -> None:
    stream = LazyStream()
    host = DevicePool(16 * 512, 4, 256, page_bytes=512, max_rows=200)
    copier = StagedCopier(stream, buffer_bytes)
    staged = DevicePool(16 * 512, 4, 256, page_bytes=512, max_rows=200, new_copier=lambda _: copier)
    exercise(host, staged, some_adapters(packed_of), seed=buffer_bytes, num_steps=120)
    assert not stream.queue, "everything is on the device when a call returns"


@pytest.mark.gpu
@pytest.mark.parametrize("buffer_bytes", [64, 1 << 16, None])
def test_a_pool_on_a_gpu_holds_what_one_on_the_host_holds(packed_of, buffer_bytes: int | None) -> None:
    def new_copier(device: torch.device) -> Copier:
        return copier_for(device) if buffer_bytes is None else StagedCopier(CudaStream(device), buffer_bytes)

    host = DevicePool(16 * 512, 4, 256, page_bytes=512, max_rows=200)
    staged = DevicePool(16 * 512, 4, 256, page_bytes=512, max_rows=200, device="cuda", new_copier=new_copier)
    exercise(host, staged, some_adapters(packed_of), seed=1, num_steps=60)


@pytest.mark.gpu
def test_copies_to_a_gpu_from_another_thread_are_there_for_kernels_that_start_afterwards() -> None:
    """Of every size around a buffer's, while the device is busy on the stream of the thread that waits."""
    device = torch.device("cuda", torch.cuda.current_device())
    copier = copier_for(device)
    size = 4 << 20
    busy = torch.randn(2048, 2048, device=device)
    for num_bytes in (0, 1, size - 1, size, size + 1, 5 * size + 3):
        source = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
        expected = source.copy()
        destination = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        for _ in range(10):
            busy = (busy @ busy).clamp(-1, 1)

        def copy(destination=destination, source=source) -> None:
            copier.copy(destination, source)
            source[:] = 0
            copier.finish()

        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
        assert np.array_equal(destination.cpu().numpy(), expected), num_bytes
