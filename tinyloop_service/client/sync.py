"""`Client`: the remote API for threads.  Any number of threads may call one client at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from tinyloop_service.arguments import Prompt, Stop, parameters
from tinyloop_service.client import calls, channel, wire
from tinyloop_service.client.calls import UNSET, Ttl, Unset
from tinyloop_service.client.keepers import Keeper
from tinyloop_service.client.results import ModelInfo, Prefix, RemotePrefixCache
from tinyloop_service.client.transports import Messages, Transport
from tinyloop_service.completion import Completion, Delta, DeltaReader
from tinyloop_service.types import Load


class Client:
    """A server at `target` ("host:port"); a context manager.

    token      sent with every call, as a bearer token; it says who calls.  Without tls everybody on the way can read it
    tls        None: plaintext; True: the system's roots; a path: a PEM file of roots to trust; a `Tls`, for who has a
               certificate of his own; or gRPC credentials.  Files are read once, here
    affinity   of several servers behind `target` ("dns:///name:port", "ipv4:one:port,other:port"), send all requests
               of a prefix to one, and none to one that is not ready
    timeout    seconds for each call, streams included; None: no limit.  DeadlineExceeded (a TimeoutError) beyond it

    Raises what Model raises for the same reason; Unavailable (a RuntimeError) when the server cannot be reached.
    """

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls: channel.TlsChoice = None,
        affinity: bool = False,
        timeout: float | None = None,
    ) -> None:
        self._transport = Transport(target, token, tls, affinity, timeout)
        self._keeper = Keeper(self._transport)
        self._closing = weakref.finalize(self, _close, self._transport, self._keeper)  # also when collected, at exit

    def config(self) -> dict[str, Any]:
        """The config keys of the model file."""
        return self.model().config

    def model(self) -> ModelInfo:
        """What the server runs, and its limits."""
        return self._transport.run(calls.model())

    def load(self) -> Load:
        """What the server is doing now."""
        return self._transport.run(calls.load())

    def tokenize(self, text: str, *, bos: bool = False) -> list[int]:
        return self._transport.run(calls.tokenize(text, bos=bos))

    def detokenize(self, ids: Prompt) -> str:
        return self._transport.run(calls.detokenize(ids))

    def build_prefix_cache(self, prompt: Prompt, loops: int | None = None, cache_window: int = 0) -> RemotePrefixCache:
        """Prefill `prompt` once; the handle keeps it on the server, and deletes it there when it is collected."""
        prefix, ids = self._transport.run(calls.build(prompt, loops, cache_window))
        self._keeper.keep(prefix.id)
        return RemotePrefixCache(prefix, ids, self._keeper.drop)

    def generate_from_prefix_cache(
        self,
        prefix: RemotePrefixCache | str,
        max_tokens: int = 32,
        loops: int | None = None,
        temperature: float = 0.0,
        top_k: int = 50,
        top_p: float = 1.0,
        cache_window: int | None = None,
        repetition_penalty: float = 1.0,
        stop_sequences: Sequence[Stop] = (),
        *,
        suffix: Prompt = (),
        seed: int | None = None,
        min_p: float = 0.0,
        ignore_eos: bool = False,
    ) -> list[int]:
        """Ids of prefix + suffix + generated.  `loops`, if given, must be the prefix's, else RuntimeError."""
        given = parameters(
            max_tokens, loops, temperature, top_k, top_p, cache_window, repetition_penalty, stop_sequences,
            seed=seed, min_p=min_p, ignore_eos=ignore_eos,
        )  # fmt: skip
        return self._transport.run(calls.generate_from(prefix, suffix, given))

    def generate(
        self,
        prompt: Prompt,
        max_tokens: int = 32,
        loops: int | None = None,
        temperature: float = 0.0,
        top_k: int = 50,
        top_p: float = 1.0,
        cache_window: int | None = None,
        repetition_penalty: float = 1.0,
        stop_sequences: Sequence[Stop] = (),
        *,
        seed: int | None = None,
        min_p: float = 0.0,
        ignore_eos: bool = False,
    ) -> list[int]:
        """Ids of prompt + generated, with no prefix."""
        given = parameters(
            max_tokens, loops, temperature, top_k, top_p, cache_window, repetition_penalty, stop_sequences,
            seed=seed, min_p=min_p, ignore_eos=ignore_eos,
        )  # fmt: skip
        return self._transport.run(calls.generate(prompt, given))

    def complete(
        self,
        prompt: Prompt | None = None,
        *,
        prefix: RemotePrefixCache | str | None = None,
        suffix: Prompt = (),
        **arguments: Any,
    ) -> Completion:
        """Generate from `prompt`, or from `prefix` and `suffix`, and wait for all of it.

        `arguments` are those of `generate`, and logprobs, n, logit_bias, stop_token_ids.
        """
        return self._transport.run(calls.complete(prompt, prefix, suffix, parameters(**arguments)))

    def complete_batch(
        self, prefix: RemotePrefixCache | str, suffixes: Sequence[Prompt], **arguments: Any
    ) -> list[Completion]:
        """One Completion per suffix, in order, all decoded at once.  `arguments` as in `complete`, alike for all."""
        each = [parameters(**arguments) for _ in suffixes]
        return self._transport.run(calls.complete_batch(prefix, suffixes, each))

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        prefix: RemotePrefixCache | str | None = None,
        suffix: Prompt = (),
        **arguments: Any,
    ) -> DeltaStream:
        """As `complete`, piece by piece.  Returns when the request is admitted; refusals are raised here."""
        return DeltaStream(self._transport.stream(calls.stream(prompt, prefix, suffix, parameters(**arguments))))

    def create_prefix(
        self,
        id: str,
        tokens_or_text: Prompt,
        *,
        loops: int | None = None,
        cache_window: int | None = None,
        ttl: Ttl = None,
        pinned: bool = False,
        parent: str | None = None,
        wait: bool = True,
    ) -> Prefix:
        """Keep a prompt's state under a name; `ttl` in seconds or as a timedelta, None: for ever.

        With `parent`, only the further tokens are given.  Without `wait` it returns in state BUILDING.
        Raises PrefixExists (a ValueError) when the name stands for other content.
        """
        steps = calls.create_prefix(
            id,
            tokens_or_text,
            loops=loops,
            cache_window=cache_window,
            ttl=ttl,
            pinned=pinned,
            parent=parent,
            wait=wait,
        )
        return self._transport.run(steps)

    def get_prefix(self, id: str, *, tokens: bool = False) -> Prefix:
        """One prefix; `tokens`: with its ids.  Raises PrefixNotFound (a KeyError)."""
        return self._transport.run(calls.get_prefix(id, tokens=tokens))

    def list_prefixes(self) -> list[Prefix]:
        """All of the caller's prefixes, by name."""
        return self._transport.run(calls.list_prefixes())

    def update_prefix(
        self, id: str, *, ttl: Ttl | Unset = UNSET, pinned: bool | Unset = UNSET, etag: str | None = None
    ) -> Prefix:
        """Change what is given.  `ttl` runs from now, None: never expires.  `etag`: only if unchanged since read."""
        return self._transport.run(calls.update_prefix(id, ttl=ttl, pinned=pinned, etag=etag))

    def delete_prefix(self, id: str, *, etag: str | None = None) -> None:
        """End the name; generations that use it finish.  Raises PrefixNotFound (a KeyError)."""
        self._transport.run(calls.delete_prefix(id, etag=etag))

    def watch_prefix(self, id: str) -> Iterator[Prefix]:
        """The prefix now and after every change, until it is READY or FAILED."""
        return map(wire.read_prefix, self._transport.stream(calls.watch_prefix(id)))

    def close(self) -> None:
        """Delete the prefixes of living handles and hang up.  Afterwards every call raises RuntimeError."""
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class DeltaStream(Iterator[Delta]):
    """The pieces of one request as they come.  Leaving it early, by `close` or by collection, cancels the request."""

    def __init__(self, messages: Messages) -> None:
        self._reader = DeltaReader()
        self._messages = messages
        first = next(messages, None)  # Started, or the refusal
        self._ready = list(self._reader.read(wire.read_outputs(first))) if first is not None else []

    def __next__(self) -> Delta:
        while not self._ready:
            self._ready = list(self._reader.read(wire.read_outputs(next(self._messages))))
        return self._ready.pop(0)

    def close(self) -> None:
        self._messages.close()


def _close(transport: Transport, keeper: Keeper) -> None:
    if not transport.is_inherited:
        keeper.close()
    transport.close()
