"""`AsyncClient`: the remote API for asyncio.  One client belongs to the event loop that first uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

from tinyloop_service.arguments import Prompt, Stop, parameters
from tinyloop_service.client import calls, channel, wire
from tinyloop_service.client.calls import UNSET, Ttl, Unset
from tinyloop_service.client.keepers import AsyncKeeper
from tinyloop_service.client.results import ModelInfo, Prefix, RemotePrefixCache
from tinyloop_service.client.transports import AsyncTransport
from tinyloop_service.completion import Completion, Delta, DeltaReader
from tinyloop_service.types import Load


class AsyncClient:
    """As `Client`, with coroutines: `async with AsyncClient(target) as client`.  Arguments and errors are the same."""

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls: channel.TlsChoice = None,
        affinity: bool = False,
        timeout: float | None = None,
    ) -> None:
        self._transport = AsyncTransport(target, token, tls, affinity, timeout)
        self._keeper = AsyncKeeper(self._transport)

    async def config(self) -> dict[str, Any]:
        """The config keys of the model file."""
        return (await self.model()).config

    async def model(self) -> ModelInfo:
        """What the server runs, and its limits."""
        return await self._transport.run(calls.model())

    async def load(self) -> Load:
        """What the server is doing now."""
        return await self._transport.run(calls.load())

    async def tokenize(self, text: str, *, bos: bool = False) -> list[int]:
        return await self._transport.run(calls.tokenize(text, bos=bos))

    async def detokenize(self, ids: Prompt) -> str:
        return await self._transport.run(calls.detokenize(ids))

    async def build_prefix_cache(
        self, prompt: Prompt, loops: int | None = None, cache_window: int = 0
    ) -> RemotePrefixCache:
        """Prefill `prompt` once; the handle keeps it on the server, and deletes it there when it is collected."""
        prefix, ids = await self._transport.run(calls.build(prompt, loops, cache_window))
        self._keeper.keep(prefix.id)
        return RemotePrefixCache(prefix, ids, self._keeper.drop)

    async def generate_from_prefix_cache(
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
        return await self._transport.run(calls.generate_from(prefix, suffix, given))

    async def generate(
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
        return await self._transport.run(calls.generate(prompt, given))

    async def complete(
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
        return await self._transport.run(calls.complete(prompt, prefix, suffix, parameters(**arguments)))

    async def complete_batch(
        self, prefix: RemotePrefixCache | str, suffixes: Sequence[Prompt], **arguments: Any
    ) -> list[Completion]:
        """One Completion per suffix, in order, all decoded at once.  `arguments` as in `complete`, alike for all."""
        each = [parameters(**arguments) for _ in suffixes]
        return await self._transport.run(calls.complete_batch(prefix, suffixes, each))

    async def stream(
        self,
        prompt: Prompt | None = None,
        *,
        prefix: RemotePrefixCache | str | None = None,
        suffix: Prompt = (),
        **arguments: Any,
    ) -> AsyncIterator[Delta]:
        """As `complete`, piece by piece: `async for delta in client.stream(...)`.  Closing it cancels the request."""
        reader = DeltaReader()
        call = calls.stream(prompt, prefix, suffix, parameters(**arguments))
        async for message in self._transport.stream(call):
            for delta in reader.read(wire.read_outputs(message)):
                yield delta

    async def create_prefix(
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
        return await self._transport.run(steps)

    async def get_prefix(self, id: str, *, tokens: bool = False) -> Prefix:
        """One prefix; `tokens`: with its ids.  Raises PrefixNotFound (a KeyError)."""
        return await self._transport.run(calls.get_prefix(id, tokens=tokens))

    async def list_prefixes(self) -> list[Prefix]:
        """All of the caller's prefixes, by name."""
        return await self._transport.run(calls.list_prefixes())

    async def update_prefix(
        self, id: str, *, ttl: Ttl | Unset = UNSET, pinned: bool | Unset = UNSET, etag: str | None = None
    ) -> Prefix:
        """Change what is given.  `ttl` runs from now, None: never expires.  `etag`: only if unchanged since read."""
        return await self._transport.run(calls.update_prefix(id, ttl=ttl, pinned=pinned, etag=etag))

    async def delete_prefix(self, id: str, *, etag: str | None = None) -> None:
        """End the name; generations that use it finish.  Raises PrefixNotFound (a KeyError)."""
        await self._transport.run(calls.delete_prefix(id, etag=etag))

    async def watch_prefix(self, id: str) -> AsyncIterator[Prefix]:
        """The prefix now and after every change, until it is READY or FAILED."""
        async for message in self._transport.stream(calls.watch_prefix(id)):
            yield wire.read_prefix(message)

    async def close(self) -> None:
        """Delete the prefixes of living handles and hang up.  Afterwards every call raises RuntimeError."""
        await self._keeper.close()
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()
