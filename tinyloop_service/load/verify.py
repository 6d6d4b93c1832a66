"""The second look: requests that were answered under load are asked again alone, and must get the same ids.

A request off a prefix is asked as one whole prompt, so that warm is held against cold as well; text, which is tokenised
otherwise in one piece, as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tinyloop_service.bench.rounds import Timeline, follow
from tinyloop_service.bench.service import Service
from tinyloop_service.errors import TinyLoopError
from tinyloop_service.load.driver import Sent
from tinyloop_service.load.prompts import Prompts
from tinyloop_service.load.results import Verification, Way


async def verify(
    service: Service, prompts: Prompts, answers: Sequence[tuple[Way, Sent]], show: Callable[[int], None]
) -> Verification:
    """One after the other; nothing else may be going on."""
    differing: list[str] = []
    for number, (way, sent) in enumerate(answers):
        show(number + 1)
        is_text = prompts.workload.content == "text"
        try:
            if is_text and way is Way.SHARED and sent.drawn.prefix is not None:
                await service.create_prefix(*prompts.prefix(sent.drawn.prefix))
            again = Timeline()
            await follow(service, prompts.ask(sent.drawn, way if is_text else Way.NO_SHARE), again)
            said = difference(sent.timeline.token_ids, again.token_ids)
        except TinyLoopError as error:  # what was measured is not lost for that
            said = f"asked again it failed: {error}"
        if said is not None:
            differing.append(f"request {sent.drawn.index}, {way.value}: {said}")
    return Verification(len(answers), len(answers) - len(differing), tuple(differing))


def difference(loaded: Sequence[int], alone: Sequence[int]) -> str | None:
    """The first place, from 0; None: there is none."""
    for place, (one, other) in enumerate(zip(loaded, alone, strict=False)):
        if one != other:
            return f"token {place} is {one}, alone {other}"
    return None if len(loaded) == len(alone) else f"{len(loaded)} tokens, alone {len(alone)}"
