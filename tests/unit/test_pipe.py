"""What the two sides of a pipe say arrives whole and in order, however the socket cuts it."""

from __future__ import annotations

import asyncio
import marshal
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyloop_service.rpc.fronts.answering import Call
from tinyloop_service.rpc.fronts.pipe import Event, Pipe

VALUES = st.one_of(st.none(), st.integers(-(2**40), 2**40), st.binary(max_size=40), st.text(max_size=20))
EVENTS = st.lists(st.lists(VALUES, min_size=1, max_size=4).map(tuple), max_size=8)


class Wire:
    """Stands for a transport, and keeps what is written."""

    def __init__(self) -> None:
        self.written = bytearray()

    def is_closing(self) -> bool:
        return False

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.written += b"".join(parts)


def pipe_to(wire: Wire, received: list[Event] | None = None) -> Pipe:
    pipe = Pipe((received if received is not None else []).append, lost=lambda: None)
    pipe.connection_made(wire)  # type: ignore[arg-type]
    return pipe


@given(turns=st.lists(EVENTS, max_size=4), cuts=st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_events_arrive_whole_and_in_order_however_they_are_cut(turns: list[list[Event]], cuts: list[int]) -> None:
    async def say_and_hear() -> list[Event]:
        wire, received = Wire(), list[Event]()
        sender, receiver = pipe_to(wire), pipe_to(Wire(), received)
        for events in turns:
            for event in events:
                sender.send(*event)
            await asyncio.sleep(0)
        at, data = 0, bytes(wire.written)
        while at < len(data):
            for cut in cuts:
                receiver.data_received(data[at : at + cut])
                at += cut
        return received

    assert asyncio.run(say_and_hear()) == [event for events in turns for event in events]


async def test_one_turn_of_the_loop_is_one_frame() -> None:
    wire = Wire()
    pipe = pipe_to(wire)
    for number in range(10):
        pipe.send(number)
    assert not wire.written
    await asyncio.sleep(0)
    length = int.from_bytes(wire.written[:8], "little")
    assert len(wire.written) == 8 + length


async def test_a_large_message_has_a_frame_of_its_own_so_that_others_need_not_wait_for_it() -> None:
    wire, large = Wire(), b"x" * 100_000
    pipe = pipe_to(wire)
    for event in ((1,), (2, large), (3,), (4,)):
        pipe.send(*event)
    await asyncio.sleep(0)
    frames, data = [], bytes(wire.written)
    while data:
        end = 8 + int.from_bytes(data[:8], "little")
        frames.append(marshal.loads(data[8:end]))
        data = data[end:]
    assert frames == [[(1,)], [(2, large)], [(3,), (4,)]]


async def test_what_was_said_before_a_close_arrives_and_then_its_end() -> None:
    ours, theirs = socket.socketpair()
    received: list[Event] = []
    lost = [asyncio.Event(), asyncio.Event()]
    one, other = Pipe(received.append, lost[0].set), Pipe(received.append, lost[1].set)
    await one.open(ours)
    await other.open(theirs)
    one.send(1, b"x" * 3_000_000)
    one.close()
    one.send(2)
    async with asyncio.timeout(10):
        await asyncio.gather(*(each.wait() for each in lost))
    assert received == [(1, b"x" * 3_000_000)]


async def test_a_handler_waits_for_a_reader_that_is_eight_messages_behind() -> None:
    sent: list[Event] = []

    class Said:
        def send(self, *event: Any) -> None:
            sent.append(event)

    call = Call(Said(), 7, ())  # type: ignore[arg-type]
    writing = asyncio.create_task(_write(call, 20))
    await asyncio.sleep(0.01)
    assert len(sent) == 8 and not writing.done()
    for _ in range(5):
        call.written()
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert len(sent) == 13
    call.task = writing
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing


async def _write(call: Call, count: int) -> None:
    for number in range(count):
        await call.write(bytes([number]))


async def test_large_messages_wait_until_those_before_them_have_left() -> None:
    pipe = pipe_to(Wire())
    pipe.pause_writing()
    await pipe.room_for(b"small")
    waiting = asyncio.create_task(pipe.room_for(b"x" * 100_000))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    pipe.resume_writing()
    await asyncio.wait_for(waiting, 10)
