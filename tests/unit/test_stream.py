"""A request's mailbox by itself: when its tokens are shown, and what one message has of them."""

from __future__ import annotations

import pytest
from byte_tokenizer import byte_tokenizer
from recording_observer import Alone
from scheduler_driver import SMALL

from tinyloop_service.observer import UNWATCHED
from tinyloop_service.scheduler.core import Core
from tinyloop_service.scheduler.delivery import Delivery
from tinyloop_service.scheduler.events import Admitted, Sampled
from tinyloop_service.scheduler.stream import Stream
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.text import TextDecoder, Tokenizer
from tinyloop_service.types import Completed, Delta, FinishReason, GenerationRequest, Output, Started, Stops

INTERVAL_NS = 10


def stream(**request: object) -> Stream:
    """Arrived and admitted at 0; its scheduler's clock stands there too."""
    made = Stream(GenerationRequest((1,), **request), 0, Alone(UNWATCHED, 0), Tokenizer(byte_tokenizer()))
    made.deliver_start(Admitted(1, 0, 1, 0))
    return made


def sample(into: Stream, text: str, time_ns: int, reason: FinishReason | None = None) -> None:
    ids = Tokenizer(byte_tokenizer()).encode(text, bos=False)
    into.deliver_tokens(Sampled(1, 0, ids, (), reason, time_ns), INTERVAL_NS)


def set_clock(of: Stream, time_ns: int) -> None:
    assert isinstance(of._scheduler, Alone)
    of._scheduler.time_ns = time_ns


async def message(of: Stream) -> tuple[Output, ...] | None:
    """What can be read now, if anything."""
    return await anext(of) if of._pending else None


def text_of(outputs: tuple[Output, ...] | None) -> str | None:
    return "".join(output.text for output in outputs if isinstance(output, Delta)) if outputs is not None else None


async def test_pieces_are_an_interval_apart_but_for_the_first_and_the_last() -> None:
    one = stream()
    sample(one, "a", 100)
    assert [type(output) for output in await message(one) or ()] == [Started, Delta]
    sample(one, "b", 105)
    assert await message(one) is None and one.is_held
    sample(one, "c", 110)
    assert text_of(await message(one)) == "bc"
    sample(one, "d", 111, FinishReason.LENGTH)
    last = await message(one)
    assert text_of(last) == "d" and isinstance(last[-1], Completed)


async def test_time_shows_what_is_held_when_it_is_due_and_starts_anew() -> None:
    one = stream()
    sample(one, "a", 100)
    await message(one)
    sample(one, "b", 105)
    for time_ns, text in ((109, None), (112, "b")):
        set_clock(one, time_ns)
        one.show(INTERVAL_NS)
        assert text_of(await message(one)) == text
    sample(one, "c", 115)
    assert await message(one) is None, "a piece was shown at 112"
    sample(one, "d", 122)
    assert text_of(await message(one)) == "cd"


async def test_the_first_token_does_not_wait_because_time_showed_the_start() -> None:
    one = stream()
    one.show(INTERVAL_NS)
    assert [type(output) for output in await message(one) or ()] == [Started]
    sample(one, "a", 3)
    assert text_of(await message(one)) == "a"
    sample(one, "b", 9)
    assert await message(one) is None, "a piece was shown at 3"


@pytest.mark.parametrize(
    ("num_rows", "lag_ms", "intervals"),
    [
        (1, 0, 1),
        (1, 1, 2),
        (1, 2.5, 3.5),
        (1, 9, 10),
        (1, 99, 10),
        (50, 0, 2.5),
        (50, 1, 2.5),
        (50, 2, 3),
        (256, 0, 10),
    ],
)
def test_intervals_are_longer_with_many_rows_and_while_the_event_loop_is_behind(
    num_rows: int, lag_ms: float, intervals: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = Delivery(Core(SMALL, SchedulerSettings()), INTERVAL_NS, UNWATCHED)
    monkeypatch.setattr(Core, "num_rows", num_rows)
    delivery.lag_ns = round(lag_ms * 10**6)
    assert delivery.interval_ns == INTERVAL_NS * intervals


@pytest.mark.parametrize("stops", [Stops(), Stops(strings=("XX",))], ids=["no stops", "stops"])
async def test_a_reader_that_comes_late_gets_all_of_it_in_one_piece(stops: Stops) -> None:
    one = stream(stops=stops)
    for time_ns, part in enumerate(("on", "e tw", "é", " three")):
        sample(one, part, time_ns)
    sample(one, "!", 9, FinishReason.LENGTH)
    _, delta, completed = await message(one) or ()
    assert isinstance(delta, Delta) and isinstance(completed, Completed)
    assert (delta.text, delta.first_index) == ("one twé three!", 0)
    assert len(delta.token_ids) == completed.usage.completion_tokens == len("one twé three!".encode())


async def test_without_stops_nothing_is_decoded_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    feed = TextDecoder.feed
    monkeypatch.setattr(TextDecoder, "feed", lambda self, ids: decoded.append(len(ids)) or feed(self, ids))
    one = stream()
    for time_ns in range(5):
        sample(one, "ab", time_ns)
    assert decoded == []
    assert text_of(await message(one)) == "ab" * 5 and decoded == [10]
