"""The frames of a streamed answer. Knows no dialect: what chunks look like is their wire's business."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from graftwork_platform.inference.output import Delta
from graftwork_platform.inference.sse import event, in_one_line


class ChunkWriter(Protocol):
    """A dialect, as far as frames need it; `wire.Wire` is one."""

    @property
    def shows_ids(self) -> bool:
        """True if chunks hold token ids beside text."""
        ...

    def chunks(self, delta: Delta) -> Iterator[msgspec.Struct]:
        """Chunks of a delta of any choice; none if there is nothing to say."""
        ...


class Frames:
    """Frames of one answer.

    Nearly all of them add text to a choice and nothing else. Such a frame differs from the last one in its text alone, so it is put
    together from the bytes around it, which are taken from two frames that the dialect itself has written.
    """

    def __init__(self, wire: ChunkWriter) -> None:
        self._wire = wire
        self._around: dict[int, tuple[bytes, bytes]] = {}  # of each choice

    def of(self, delta: Delta) -> bytes:
        """All frames of a delta, one behind the other; none if there is nothing to say."""
        if delta.tokens is not None or delta.finish is not None or delta.is_first or self._wire.shows_ids:
            return b"".join([event(chunk) for chunk in self._wire.chunks(delta)])
        if not delta.text:
            return b""
        around = self._around.get(delta.index)
        if around is None:
            around = self._around[delta.index] = self._find_around(delta.index)
        return around[0] + in_one_line(delta.text) + around[1]

    def _find_around(self, index: int) -> tuple[bytes, bytes]:
        """Two frames whose texts are one letter each differ in one byte, which stands between the text's quotes."""
        [one], [other] = (list(self._wire.chunks(Delta(letter, [], index=index))) for letter in "ab")
        frame, other_frame = event(one), event(other)
        place = next(place for place, (byte, differing) in enumerate(zip(frame, other_frame, strict=True)) if byte != differing)
        return frame[: place - 1], frame[place + 2 :]
