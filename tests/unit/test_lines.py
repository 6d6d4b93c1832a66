"""The way out of a log: in order, nobody waits, what finds no room is counted and told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import structlog
from forks import forked
from full_pipe import fill

from tinyloop_service.observe.lines import Lines, Stream


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Where to read and where to write."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += os.read(descriptor, count - len(data))
    return data


def test_lines_leave_in_order_and_whole(pipe: tuple[int, int]) -> None:
    lines = Lines(pipe[1])
    said = [f"line {number} ü \udc80\n" for number in range(100)]
    for line in said:
        lines.write(line)
    assert lines.settle(60)
    expected = "".join(said).encode(errors="backslashreplace")
    assert read(pipe[0], len(expected)) == expected
    long = "x" * 200_000 + "\n"  # more than a pipe holds
    lines.write(long)
    assert read(pipe[0], len(long)) == long.encode()


def test_a_reader_that_stalls_holds_up_nobody_and_is_told_what_it_missed(pipe: tuple[int, int]) -> None:
    filler = fill(pipe[1])
    lines = Lines(pipe[1], most=5)
    lines.write("0\n")
    while not lines._waiting.empty():  # this one is on its way
        time.sleep(0.001)
    kept = 1
    with pytest.raises(structlog.DropEvent):
        while lines.admit(None, "info", {}) == {}:
            lines.write(f"{kept}\n")
            kept += 1
    assert kept == 1 + 5
    with pytest.raises(structlog.DropEvent):
        lines.admit(None, "info", {})
    assert lines.dropped == 2
    assert not lines.settle(0.01), "nothing has left"
    said = "".join(f"{number}\n" for number in range(kept)).encode()
    assert read(pipe[0], filler + len(said))[filler:] == said
    assert lines.settle(60)
    assert lines.admit(None, "info", {"event": "answered"}) == {"event": "answered", "dropped_lines": 2}
    assert lines.admit(None, "info", {"event": "answered"}) == {"event": "answered"}
    assert lines.dropped == 2


def test_who_shares_the_pipe_may_have_made_it_one_that_does_not_block(pipe: tuple[int, int]) -> None:
    filler = fill(pipe[1])
    os.set_blocking(pipe[1], False)
    lines = Lines(pipe[1])
    lines.write("late\n")
    assert not lines.settle(0.05)
    assert read(pipe[0], filler + 5)[filler:] == b"late\n"
    assert lines.settle(60) and lines.dropped == 0


def test_a_reader_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    lines = Lines(writing)
    for end in (reading, writing):
        os.close(end)
    lines.write("to nobody\n")
    assert lines.settle(60) and lines.dropped == 1


def test_a_descriptor_that_is_closed_takes_lines_to_nowhere() -> None:
    """As of a server whose standard error is closed; its number is not given to what is opened next."""
    closed = os.dup(1)
    os.close(closed)
    lines = Lines(closed)
    lines.write("nobody hears this\n")
    assert lines.settle(60) and not lines.dropped
    other = os.open(os.devnull, os.O_RDONLY)
    assert other != closed
    os.close(other)
    os.close(closed)


def test_what_is_printed_waits_in_whole_lines(pipe: tuple[int, int]) -> None:
    lines = Lines(pipe[1])
    stream = Stream(lines)
    print("a", "b", file=stream)
    stream.write("not yet ")
    lines.write("a line of log\n")
    print("ended", file=stream)
    stream.write("first\nsecond")
    stream.flush()
    expected = b"a b\na line of log\nnot yet ended\nfirst\nsecond"
    assert read(pipe[0], len(expected)) == expected and lines._waiting.qsize() == 0
    assert stream.fileno() == lines.fileno() and not stream.isatty()


def test_prints_have_no_more_room_than_lines(pipe: tuple[int, int]) -> None:
    fill(pipe[1])
    lines = Lines(pipe[1], most=5)
    for number in range(100):
        print(number, file=Stream(lines))
    assert lines._waiting.qsize() <= 5 and 94 <= lines.dropped <= 95


def test_a_forked_process_writes_by_itself_and_what_is_its_own(pipe: tuple[int, int]) -> None:
    held = fill(pipe[1])
    lines = Lines(pipe[1], most=2)
    for _ in range(10):  # the parent's room is taken, and what it has to say is not the child's
        lines.write_if_room("parent\n")

    def child() -> int:
        assert len(read(pipe[0], held)) == held
        stream = Stream(lines)
        print("printed", file=stream)
        stream.write("no end")
        stream.flush()
        lines.admit(None, "info", {})
        lines.write(" logged\n")
        return 5 if lines.settle() else 6

    assert forked(child) == 5
    own, of_parent = b"printed\nno end logged\n", b"parent\n"
    written = read(pipe[0], len(own) + (10 - lines.dropped) * len(of_parent))
    assert written.replace(of_parent, b"") == own
