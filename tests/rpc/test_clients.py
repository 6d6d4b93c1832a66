"""The clients against a real server: all that Model does, thread-safe, with Model's exceptions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from clients_harness import GREEDY, PROMPT, in_thread
from rpc_harness import CONFIG, Served, expected_tokens, serving

from tinyloop_service import errors
from tinyloop_service.client import Client, RemotePrefixCache, channel
from tinyloop_service.types import FinishReason, PrefixState


async def test_the_synchronous_client_does_all_that_model_does(served: Served) -> None:
    def work(client: Client) -> None:
        assert client.config() == CONFIG and client.model().replica == "replica-0"
        prefix = client.build_prefix_cache(np.array(PROMPT), loops=3)
        assert isinstance(prefix, RemotePrefixCache) and (prefix.loops, prefix.cache_window) == (3, 0)
        assert prefix.prompt.dtype == np.int32 and tuple(prefix.prompt) == PROMPT and prefix.num_bytes > 0
        whole = client.generate((*PROMPT, 7), 6, 3, ignore_eos=True)
        assert whole == [*PROMPT, 7, *expected_tokens((*PROMPT, 7), 6, loops=3)]
        assert client.generate_from_prefix_cache(prefix, 6, suffix=(7,), ignore_eos=True) == whole
        completion = client.complete(prefix=prefix, suffix=[7], **GREEDY)
        assert completion.token_ids == tuple(whole[100:]) and completion.usage.cached_tokens == 99
        batch = client.complete_batch(prefix, [(7,), (8,), ()], **GREEDY)
        assert [c.token_ids for c in batch[:1]] == [completion.token_ids] and len(batch) == 3
        deltas = list(client.stream(prefix=prefix, suffix=(7,), **GREEDY))
        assert tuple(i for d in deltas for i in d.token_ids) == completion.token_ids
        assert deltas[-1].finish_reason is FinishReason.LENGTH and deltas[-1].usage == completion.usage
        assert client.complete_batch(prefix, []) == []

    await in_thread(served, work)


async def test_the_synchronous_client_names_prefixes(served: Served) -> None:
    def work(client: Client) -> None:
        created = client.create_prefix("p", "hello", ttl=100, pinned=True)
        assert created.state is PrefixState.READY and created.pinned and created.expire_time is not None
        assert client.get_prefix("p", tokens=True).tokens == tuple(client.tokenize("hello", bos=True))
        assert [prefix.id for prefix in client.list_prefixes()] == ["p"]
        assert client.update_prefix("p", ttl=None).expire_time is None
        assert [state.state for state in client.watch_prefix("p")] == [PrefixState.READY]
        from_name = client.generate_from_prefix_cache("p", 4, suffix=" you", ignore_eos=True)
        assert from_name == client.generate([*client.tokenize("hello you", bos=True)], 4, ignore_eos=True)
        client.delete_prefix("p")
        with pytest.raises(KeyError):
            client.get_prefix("p")

    await in_thread(served, work)


async def test_one_client_serves_many_threads(served: Served) -> None:
    def work(client: Client) -> None:
        client.create_prefix("p", PROMPT)
        with ThreadPoolExecutor(16) as pool:
            many = list(pool.map(lambda i: client.complete(prefix="p", suffix=(i,), **GREEDY), range(1, 65)))
        for i, completion in enumerate(many, 1):
            assert completion.token_ids == expected_tokens((*PROMPT, i), 6)

    await in_thread(served, work)


REFUSED: list[tuple[Callable[[Client], Any], type[Exception], str]] = [
    (lambda c: c.generate(()), ValueError, "prompt: "),
    (lambda c: c.generate((1, 512)), ValueError, "prompt[1]: "),
    (lambda c: c.generate((1, -1)), ValueError, "prompt[1]: "),
    (lambda c: c.generate((1,), 0), ValueError, "max_tokens: "),
    (lambda c: c.generate((1,), 4, 99), ValueError, "loops: "),
    (lambda c: c.generate((1,), 4, top_p=0.0), ValueError, "top_p: "),
    (lambda c: c.complete((1,), logit_bias={600: 1.0}), ValueError, "logit_bias[600]: "),
    (lambda c: c.complete(prefix="p", suffix=(1, 600)), ValueError, "suffix[1]: "),
    (lambda c: c.complete(), ValueError, "prompt: "),
    (lambda c: c.complete((1,), prefix="p"), ValueError, "prompt: "),
    (lambda c: c.complete((1,), suffix=(1,)), ValueError, "suffix: "),
    (lambda c: c.complete(prefix=object()), ValueError, "prefix: "),
    (lambda c: c.generate((1,), 5000), RuntimeError, "2048"),
    (lambda c: c.complete(prefix="p", loops=5), RuntimeError, "loops mismatch"),
    (lambda c: c.complete(prefix="nobody"), KeyError, "nobody"),
    (lambda c: next(c.stream(prefix="nobody")), KeyError, "nobody"),
    (lambda c: next(c.watch_prefix("nobody")), KeyError, "nobody"),
    (lambda c: c.create_prefix("P", (1,)), ValueError, "id: "),
    (lambda c: c.create_prefix("p", (1, 2)), ValueError, "'p'"),
    (lambda c: c.create_prefix("q", (1,), ttl=0), ValueError, "ttl: "),
    (lambda c: c.create_prefix("q", (700,)), ValueError, "tokens_or_text[0]: "),
    (lambda c: c.build_prefix_cache((700,)), ValueError, "prompt[0]: "),
    (lambda c: c.detokenize([700]), ValueError, "ids[0]: "),
]


async def test_refusals_are_the_exceptions_of_the_model(served: Served) -> None:
    def work(client: Client) -> None:
        client.create_prefix("p", PROMPT)
        for call, kind, text in REFUSED:
            with pytest.raises(kind) as caught:
                call(client)
            assert isinstance(caught.value, errors.TinyLoopError) and text in str(caught.value), (text, caught.value)

    await in_thread(served, work)


async def test_arguments_that_only_named_prefixes_have_are_checked_too(served: Served) -> None:
    async with served.client() as client:
        for field, call in {
            "pinned": client.create_prefix("p", PROMPT, pinned="no"),  # type: ignore[arg-type]
            "wait": client.create_prefix("p", PROMPT, wait=0),  # type: ignore[arg-type]
            "etag": client.delete_prefix("p", etag=b"x"),  # type: ignore[arg-type]
            "text": client.tokenize(b"bytes"),  # type: ignore[arg-type]
            "suffix": client.complete(PROMPT, suffix=3),  # type: ignore[arg-type]
        }.items():
            with pytest.raises(errors.InvalidArgument) as caught:
                await call
            assert caught.value.field == field
        assert await client.list_prefixes() == []


async def test_text_that_a_server_cannot_read_is_the_callers_argument() -> None:
    async with serving() as served, served.client() as client:
        for field, call in {
            "prompt": client.build_prefix_cache("text"),
            "suffix": client.generate_from_prefix_cache("p", suffix="text"),
            "tokens_or_text": client.create_prefix("q", "text"),
            "text": client.tokenize("text"),
        }.items():
            await client.create_prefix("p", PROMPT)
            with pytest.raises(errors.InvalidArgument) as caught:
                await call
            assert caught.value.field == field


def test_credentials(tmp_path: Any) -> None:
    assert channel.credentials(None) is None and channel.credentials(False) is None
    given = grpc.ssl_channel_credentials()
    assert channel.credentials(given) is given
    assert isinstance(channel.credentials(True), grpc.ChannelCredentials)
    roots = tmp_path / "ca.pem"
    roots.write_bytes(b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n")
    assert isinstance(channel.credentials(roots), grpc.ChannelCredentials)
    with pytest.raises(OSError):
        channel.credentials(tmp_path / "missing.pem")
