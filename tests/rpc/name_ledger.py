"""What callers were told about names, kept beside a server that may be killed at any moment.

Of each name the ledger holds every state that it may be in: one, while each change was answered; the one before and the
one after, once a change was sent and no answer came.  A name has one writer at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field

import grpc
from rpc_harness import expected_tokens

from tinyloop_service.pb import prefix_pb2 as p
from tinyloop_service.types import TokenIds

SUFFIX = (7, 8)
NEW_TOKENS = 6
_REFUSED = {  # it is certain that nothing was done
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.FAILED_PRECONDITION,
}


class Gone(Exception):
    """The server that was asked does not answer any more."""


@dataclass(frozen=True)
class State:
    """A name that is there."""

    tokens: TokenIds  # the whole input
    etag: str | None = None  # None: never told

    def is_seen_in(self, prefix: p.Prefix) -> bool:
        return tuple(prefix.input.tokens.ids) == self.tokens and self.etag in (None, prefix.etag)


@dataclass
class Name:
    """One name, and all that it may be: a State, or None where it may be absent."""

    id: str
    possible: set[State | None] = field(default_factory=lambda: {None})
    contents: set[TokenIds] = field(default_factory=set)  # ever since the last verification

    @property
    def certain(self) -> State | None:
        """What it is, where that is known and it is there."""
        return next(iter(self.possible)) if len(self.possible) == 1 else None

    async def change(self, after: State | None, call: Awaitable[object]) -> None:
        """Send a change that leads to `after`."""
        before = set(self.possible)
        self.possible.add(after)
        if after is not None:
            self.contents.add(after.tokens)
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSED:
                self.possible = before
                return
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise Gone from None
            raise
        if after is None:
            self.possible = {None}
        else:
            assert isinstance(answer, p.Prefix)
            self.possible = {State(after.tokens, answer.etag)}

    def verify(self, found: p.Prefix | None) -> str | None:
        """What is wrong with how it was found; None for nothing, and from then on that is what it is."""
        if found is None:
            if None not in self.possible:
                return f"{self.id}: lost, though it was acknowledged: {self._told()}"
            self.possible, self.contents = {None}, set()
            return None
        if not any(state is not None and state.is_seen_in(found) for state in self.possible):
            return f"{self.id}: {len(found.input.tokens.ids)} tokens, etag {found.etag}, but told was {self._told()}"
        tokens = tuple(found.input.tokens.ids)
        self.possible, self.contents = {State(tokens, found.etag)}, {tokens}
        return None

    def is_answer(self, generated: TokenIds) -> bool:
        """Whether these tokens come from a whole build of anything that the name may have stood for."""
        return any(generated == expected_tokens((*tokens, *SUFFIX), NEW_TOKENS) for tokens in self.contents)

    def _told(self) -> str:
        states = [state and f"{len(state.tokens)} tokens, etag {state.etag}" for state in self.possible]
        return " or ".join(str(state or "absent") for state in states)
