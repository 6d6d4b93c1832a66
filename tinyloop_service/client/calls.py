"""Every method of the clients, written once and without I/O.

A method is a generator that yields the calls it needs (one, or several to run at once) and gets their responses:

    ids = yield from prompt_ids(prompt, bos=True)
    completion = yield Call("GenerationService", "GenerateUnary", request)

`sync.py` and `aio.py` run these generators over their kind of channel.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from tinyloop_service import arguments
from tinyloop_service.arguments import Parameters, Prompt
from tinyloop_service.client import wire
from tinyloop_service.client.results import ModelInfo, Prefix, RemotePrefixCache
from tinyloop_service.completion import Completion
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.pb import generation_pb2, input_pb2, model_pb2, prefix_pb2
from tinyloop_service.rpc.convert import COLLECTION, write_duration
from tinyloop_service.types import Load, TokenIds

HANDLE_TTL_NS = 300 * 10**9  # of the prefix behind a handle; renewed at a third of it


@dataclass(frozen=True, slots=True)
class Call:
    """One RPC."""

    service: str
    method: str
    request: Message
    prefix: str | None = None  # id, for the routing header
    content_field: str = "prompt"  # what the Python caller calls the request's input


class Unset:
    """Says that an argument was not given, where None has a meaning."""

    def __repr__(self) -> str:
        return "unchanged"


UNSET = Unset()
T = TypeVar("T")
Steps = Generator[Call | tuple[Call, ...], Any, T]
Ttl = float | timedelta | None


def model() -> Steps[ModelInfo]:
    return wire.read_model((yield Call("ModelService", "GetModel", model_pb2.GetModelRequest())))


def load() -> Steps[Load]:
    return wire.read_load((yield Call("ModelService", "GetLoad", model_pb2.GetLoadRequest())))


def tokenize(text: str, *, bos: bool) -> Steps[list[int]]:
    request = model_pb2.TokenizeRequest(text=arguments.text(text, "text"), add_bos=bos)
    response = yield Call("ModelService", "Tokenize", request, content_field="text")
    return list(response.tokens.ids)


def detokenize(ids: Prompt) -> Steps[str]:
    tokens = input_pb2.Tokens(ids=arguments.token_ids(ids, "ids"))
    response = yield Call("ModelService", "Detokenize", model_pb2.DetokenizeRequest(tokens=tokens), content_field="ids")
    return str(response.text)


def create_prefix(
    prefix_id: str,
    content: Prompt,
    *,
    loops: int | None,
    cache_window: int | None,
    ttl: Ttl,
    pinned: bool,
    parent: str | None,
    wait: bool,
) -> Steps[Prefix]:
    request = wire.write_create(
        arguments.prefix_id(prefix_id, "id"),
        arguments.prompt(content, "tokens_or_text"),
        loops=arguments.loops(loops),
        cache_window=arguments.cache_window(cache_window),
        ttl_ns=arguments.ttl_ns(ttl),
        pinned=arguments.flag(pinned, "pinned"),
        parent=None if parent is None else arguments.prefix_id(parent, "parent"),
        wait=arguments.flag(wait, "wait"),
    )
    return wire.read_prefix((yield Call("PrefixService", "CreatePrefix", request, prefix_id, "tokens_or_text")))


def build(prompt: Prompt, loops: int | None, cache_window: int | None) -> Steps[tuple[Prefix, TokenIds]]:
    """A prefix under a new id, for a handle; and its ids."""
    ids = yield from _ids(arguments.prompt(prompt), bos=True, field="prompt")
    request = wire.write_create(
        str(uuid.uuid4()),
        ids,
        loops=arguments.loops(loops),
        cache_window=arguments.cache_window(cache_window),
        ttl_ns=HANDLE_TTL_NS,
        pinned=False,
        parent=None,
        wait=True,
    )
    return wire.read_prefix((yield Call("PrefixService", "CreatePrefix", request, request.prefix_id))), ids


def get_prefix(prefix_id: str, *, tokens: bool = False) -> Steps[Prefix]:
    name = _name(prefix_id)
    view = prefix_pb2.PREFIX_VIEW_FULL if tokens else prefix_pb2.PREFIX_VIEW_BASIC
    request = prefix_pb2.GetPrefixRequest(name=name, view=view)
    return wire.read_prefix((yield Call("PrefixService", "GetPrefix", request, prefix_id)))


def list_prefixes() -> Steps[list[Prefix]]:
    found: list[Prefix] = []
    page_token = ""
    while True:
        request = prefix_pb2.ListPrefixesRequest(page_size=1000, page_token=page_token)
        page = yield Call("PrefixService", "ListPrefixes", request)
        found.extend(map(wire.read_prefix, page.prefixes))
        page_token = page.next_page_token
        if not page_token:
            return found


def update_prefix(prefix_id: str, *, ttl: Ttl | Unset, pinned: bool | Unset, etag: str | None) -> Steps[Prefix]:
    prefix, paths = prefix_pb2.Prefix(name=_name(prefix_id), etag=_etag(etag)), []
    if not isinstance(ttl, Unset):
        paths.append("ttl")
        ttl_ns = arguments.ttl_ns(ttl)
        if ttl_ns is not None:
            prefix.ttl.CopyFrom(write_duration(ttl_ns))
    if not isinstance(pinned, Unset):
        paths.append("pinned")
        prefix.pinned = arguments.flag(pinned, "pinned")
    request = prefix_pb2.UpdatePrefixRequest(prefix=prefix, update_mask=FieldMask(paths=paths))
    return wire.read_prefix((yield Call("PrefixService", "UpdatePrefix", request, prefix_id)))


def renew(prefix_id: str) -> Steps[Prefix]:
    """Give the prefix behind a handle its full time again."""
    return update_prefix(prefix_id, ttl=HANDLE_TTL_NS / 1e9, pinned=UNSET, etag=None)


def delete_prefix(prefix_id: str, *, etag: str | None = None) -> Steps[None]:
    request = prefix_pb2.DeletePrefixRequest(name=_name(prefix_id), etag=_etag(etag))
    yield Call("PrefixService", "DeletePrefix", request, prefix_id)


def watch_prefix(prefix_id: str) -> Call:
    """A stream of Prefix messages."""
    return Call("PrefixService", "WatchPrefix", prefix_pb2.WatchPrefixRequest(name=_name(prefix_id)), prefix_id)


def stream(prompt: Prompt | None, prefix: object, suffix: Prompt, parameters: Parameters) -> Call:
    """A stream of GenerateResponse messages."""
    name, content, field = _start(prompt, prefix, suffix)
    request = wire.write_generate(name, content, parameters, omit_text=False, packed=True)
    return Call("GenerationService", "Generate", request, name, field)


def complete(prompt: Prompt | None, prefix: object, suffix: Prompt, parameters: Parameters) -> Steps[Completion]:
    return wire.read_completion((yield _unary(*_start(prompt, prefix, suffix), parameters)))


def complete_batch(prefix: object, suffixes: Sequence[Prompt], parameters: list[Parameters]) -> Steps[list[Completion]]:
    """`parameters`: one per suffix, each with its seed."""
    starts = [_start(None, prefix, suffix) for suffix in suffixes]
    calls = tuple(_unary(*start, each) for start, each in zip(starts, parameters, strict=True))
    return [wire.read_completion(message) for message in (yield calls)]


def generate(prompt: Prompt, parameters: Parameters) -> Steps[list[int]]:
    ids = yield from _ids(arguments.prompt(prompt), bos=True, field="prompt")
    response = yield _unary(None, ids, "prompt", parameters, omit_text=True)
    return [*ids, *wire.read_completion(response).token_ids]


def generate_from(prefix: object, suffix: Prompt, parameters: Parameters) -> Steps[list[int]]:
    name, content, field = _start(None, prefix, suffix)
    assert name is not None
    known = yield from _prefix_ids(prefix, name)
    ids = yield from _ids(content, bos=False, field=field)
    response = yield _unary(name, ids, field, parameters, omit_text=True)
    return [*known, *ids, *wire.read_completion(response).token_ids]


def _unary(
    prefix: str | None, content: str | TokenIds, field: str, parameters: Parameters, *, omit_text: bool = False
) -> Call:
    request = wire.write_generate(prefix, content, parameters, omit_text=omit_text)
    unary = generation_pb2.GenerateUnaryRequest(generation=request)
    return Call("GenerationService", "GenerateUnary", unary, prefix, field)


def _start(prompt: Prompt | None, prefix: object, suffix: Prompt) -> tuple[str | None, str | TokenIds, str]:
    """The prefix's id, what follows it (or the whole prompt), and the name of that argument."""
    if (prompt is None) == (prefix is None):
        raise InvalidArgument("prompt", "give either prompt, or prefix with an optional suffix")
    if prefix is None:
        if arguments.suffix(suffix):
            raise InvalidArgument("suffix", "needs a prefix; append it to the prompt instead")
        return None, arguments.prompt(prompt), "prompt"
    if not isinstance(prefix, str | RemotePrefixCache):
        raise InvalidArgument("prefix", "is neither a name nor a prefix cache of this client")
    name = prefix.id if isinstance(prefix, RemotePrefixCache) else arguments.prefix_id(prefix, "prefix")
    return name, arguments.suffix(suffix), "suffix"


def _prefix_ids(prefix: object, name: str) -> Steps[TokenIds]:
    """Known to a handle; asked for by name."""
    if isinstance(prefix, RemotePrefixCache):
        return prefix._prompt
    described = yield from get_prefix(name, tokens=True)
    return described.tokens or ()


def _ids(content: str | TokenIds, *, bos: bool, field: str) -> Steps[TokenIds]:
    if not isinstance(content, str):
        return content
    if not content:
        return ()
    request = model_pb2.TokenizeRequest(text=content, add_bos=bos)
    response = yield Call("ModelService", "Tokenize", request, content_field=field)
    return tuple(response.tokens.ids)


def _name(prefix_id: str) -> str:
    return COLLECTION + arguments.prefix_id(prefix_id, "id")


def _etag(etag: str | None) -> str:
    """Empty: whatever it is."""
    return "" if etag is None else arguments.text(etag, "etag")
