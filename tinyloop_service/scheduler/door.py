"""The door: what is refused before anything is queued, and the defaults that are filled in.

In: definitions and requests as callers gave them, and the prefix they name.  Out: depths, windows, recipes, or the
error that says what was given, what is expected and the way out.  It refuses to change anything.
"""

from __future__ import annotations

from tinyloop_service.engine.api import Limits
from tinyloop_service.errors import InvalidArgument, LoopsMismatch, ParentMismatch, SequenceTooLong
from tinyloop_service.scheduler.prefix import Prefix, Recipe, content_digest
from tinyloop_service.scheduler.sequences import Extent
from tinyloop_service.types import MAX_CHOICES, GenerationRequest, PrefixDefinition, TokenIds


def check_tokens(field: str, tokens: TokenIds, limits: Limits) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < limits.vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < limits.vocab_size)
        raise InvalidArgument(field, f"token id {wrong} is outside the vocabulary, 0 to {limits.vocab_size - 1}")


def check_loops(loops: int, limits: Limits) -> None:
    if not 1 <= loops <= limits.max_loops:
        raise InvalidArgument("loops", f"{loops} given, 1 to {limits.max_loops} expected")


def check_window(window: int) -> None:
    if window < 0:
        raise InvalidArgument("cache_window", f"{window} given, at least 0 expected (0 is no window)")


def make_recipe(definition: PrefixDefinition, parent: Prefix | None, limits: Limits) -> Recipe:
    """A definition with its defaults, checked against the model and its parent."""
    if not definition.tokens:
        raise InvalidArgument("input", "an empty prompt; give at least one token")
    check_tokens("input", definition.tokens, limits)
    loops, window = definition.loops, definition.cache_window
    if parent is None:
        loops = limits.default_loops if loops is None else loops
        start, inherited, above = 0, TokenIds(), None
    else:
        loops, window = _match_parent(definition, parent)
        start, inherited = parent.recipe.extent.end, parent.recipe.tokens
        above = parent.recipe.content_sha256
    window = window or 0
    check_loops(loops, limits)
    check_window(window)
    tokens = inherited + definition.tokens
    if len(tokens) > limits.max_seq_len:
        raise SequenceTooLong(f"a prefix of {len(tokens)} tokens; the model's sequences hold {limits.max_seq_len}")
    extent = Extent(start, len(tokens), loops, window)
    digest = content_digest(tokens, extent, limits.cache_mode.value, above)
    return Recipe(tokens, extent, parent, definition.parent, digest)


def _match_parent(definition: PrefixDefinition, parent: Prefix) -> tuple[int, int]:
    extent = parent.recipe.extent
    for field, given, has in (
        ("loops", definition.loops, extent.loops),
        ("cache_window", definition.cache_window, extent.window),
    ):
        if given is not None and given != has:
            raise ParentMismatch(f"{field} {given} given, parent {definition.parent!r} has {has}; leave {field} out")
    return extent.loops, extent.window


def match_request(request: GenerationRequest, prefix: Prefix | None, limits: Limits) -> tuple[int, int]:
    """The loops and the window of a request."""
    check_tokens("input", request.tokens, limits)
    if not request.tokens and prefix is None:
        raise InvalidArgument("input", "an empty prompt; give at least one token, or name a prefix")
    if request.max_tokens < 1:
        raise InvalidArgument("max_tokens", f"{request.max_tokens} given, at least 1 expected")
    if not 1 <= request.n <= min(MAX_CHOICES, limits.max_rows):
        raise InvalidArgument("n", f"{request.n} given, 1 to {min(MAX_CHOICES, limits.max_rows)} expected")
    window = request.cache_window or 0
    check_window(window)
    if prefix is None:
        loops = limits.default_loops if request.loops is None else request.loops
        check_loops(loops, limits)
    else:
        loops, window = _match_prefix(request, prefix, window)
    prompt_len = (prefix.recipe.extent.end if prefix is not None else 0) + len(request.tokens)
    if prompt_len + request.max_tokens > limits.max_seq_len:
        raise SequenceTooLong(
            f"prompt of {prompt_len} + max_tokens of {request.max_tokens} = {prompt_len + request.max_tokens} tokens; "
            f"the model's sequences hold {limits.max_seq_len}; shorten the prompt or lower max_tokens"
        )
    return loops, window


def _match_prefix(request: GenerationRequest, prefix: Prefix, window: int) -> tuple[int, int]:
    extent = prefix.recipe.extent
    if request.loops is not None and request.loops != extent.loops:
        raise LoopsMismatch(
            f"loops mismatch: the request asks for {request.loops}, the prefix was built at {extent.loops}; "
            f"leave loops out, or build a prefix at {request.loops}"
        )
    if window and extent.window and window > extent.window:
        raise InvalidArgument(
            "cache_window", f"{window} given; the prefix was built with {extent.window}, which can only be narrowed"
        )
    return extent.loops, window or extent.window
