"""Generate and GenerateUnary on a real server: what comes back, and that text is as api.md says."""

from __future__ import annotations

import asyncio

import pytest
from rpc_harness import BOS, Served, byte_tokenizer, collect, expected_tokens, ids, serving

from tinyloop_service.client.calls import Call
from tinyloop_service.client.wire import read_output, read_outputs
from tinyloop_service.completion import CompletionBuilder
from tinyloop_service.engine.api import Open
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.errors import LoopsMismatch, PrefixExists, PrefixNotFound
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import prefix_pb2
from tinyloop_service.types import FinishReason

PROMPT = tuple(range(1, 100))


async def test_a_stream_is_started_deltas_and_one_completed(served: Served) -> None:
    request = g.GenerateRequest(input=ids(*PROMPT), max_tokens=9, ignore_eos=True, seed=7)
    messages = await collect(served.generation.Generate(request))
    kinds = [message.WhichOneof("output") for message in messages]
    assert kinds[0] == "started" and kinds[-1] == "completed" and set(kinds[1:-1]) == {"delta"}
    started, done = messages[0].started, messages[-1].completed
    assert (started.replica, started.prompt_tokens, started.cached_tokens, started.seed) == ("replica-0", 99, 0, 7)
    received, at = [], 0
    for message in messages[1:-1]:
        assert message.delta.first_index == at
        received += message.delta.token_ids
        at += len(message.delta.token_ids)
    assert tuple(received) == expected_tokens(PROMPT, 9)
    assert done.finish_reason == g.FINISH_REASON_LENGTH
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (99, 9)
    assert done.usage.HasField("cached_tokens") and done.usage.cached_tokens == 0


async def test_unary_equals_the_stream_and_a_prefix_equals_the_whole_prompt(served: Served) -> None:
    async with served.client() as client:
        whole = await client.complete(PROMPT, max_tokens=12, ignore_eos=True, logprobs=3)
        await client.create_prefix("p", PROMPT[:70])
        warm = await client.complete(prefix="p", suffix=PROMPT[70:], max_tokens=12, ignore_eos=True, logprobs=3)
        assert (whole.token_ids, whole.logprobs) == (warm.token_ids, warm.logprobs)
        assert len(warm.logprobs) == 12 and all(len(each.top) == 3 for each in warm.logprobs)
        assert (whole.usage.cached_tokens, warm.usage.cached_tokens, warm.usage.prompt_tokens) == (0, 70, 99)
        streamed = [d async for d in client.stream(prefix="p", suffix=PROMPT[70:], max_tokens=12, ignore_eos=True)]
        assert tuple(i for d in streamed for i in d.token_ids) == warm.token_ids
        assert [d.finish_reason for d in streamed if d.finish_reason] == [FinishReason.LENGTH]
        assert streamed[-1].usage == warm.usage


async def test_an_empty_suffix_starts_where_the_prefix_ends(served: Served) -> None:
    async with served.client() as client:
        await client.create_prefix("p", PROMPT)
        completion = await client.complete(prefix="p", max_tokens=5, ignore_eos=True)
        assert completion.token_ids == expected_tokens(PROMPT, 5)


async def test_bos_stands_before_a_prompt_and_a_prefix_never_before_a_suffix(served: Served) -> None:
    text_ids = byte_tokenizer().encode("hello there", bos=False)
    async with served.client() as client:
        assert await client.tokenize("hello there") == list(text_ids)
        assert await client.tokenize("hello there", bos=True) == [BOS, *text_ids]
        assert await client.detokenize(text_ids) == "hello there"
        generated = await client.generate("hello there", 4, ignore_eos=True)
        assert generated[: len(text_ids) + 1] == [BOS, *text_ids]
        prefix = await client.create_prefix("greeting", "hello")
        assert prefix.token_count == 6
        child = await client.create_prefix("child", " there", parent="greeting")
        assert child.token_count == 12 and child.parent == "greeting"
        for warm in (
            await client.generate_from_prefix_cache("greeting", 4, suffix=" there", ignore_eos=True),
            await client.generate_from_prefix_cache("child", 4, ignore_eos=True),
        ):
            assert warm == generated


async def test_text_and_stops_in_text(served: Served) -> None:
    served_text = "xy END tail"
    shown = byte_tokenizer().encode(served_text, bos=False)
    engine = served.engine
    engine._next_token = lambda opened, length, token: shown[min(length - 3, len(shown) - 1)]
    async with served.client() as client:
        whole = await client.complete((5, 6, 7), max_tokens=len(shown))
        assert whole.text == served_text and whole.finish_reason is FinishReason.LENGTH
        stopped = await client.complete((5, 6, 7), max_tokens=len(shown), stop_sequences=["END"])
        assert (stopped.text, stopped.finish_reason, stopped.token_ids) == ("xy ", FinishReason.STOP, shown[:3])
        by_ids = await client.complete((5, 6, 7), max_tokens=len(shown), stop_token_ids=[shown[3]])
        assert (by_ids.token_ids, by_ids.finish_reason) == (shown[:3], FinishReason.STOP)
        silent = await served.generation.GenerateUnary(
            g.GenerateUnaryRequest(generation=g.GenerateRequest(input=ids(5, 6, 7), max_tokens=4, omit_text=True))
        )
        assert silent.choices[0].text == "" and len(silent.choices[0].token_ids) == 4


async def test_choices_differ_are_reproducible_and_choice_0_is_the_single_request(served: Served) -> None:
    sampling = {"temperature": 1.0, "seed": 2**64 - 1, "max_tokens": 8, "ignore_eos": True}
    async with served.client() as client:
        three = await client.complete(PROMPT, n=3, **sampling)
        again = await client.complete(PROMPT, n=3, **sampling)
        single = await client.complete(PROMPT, **sampling)
    assert [c.token_ids for c in three.choices] == [c.token_ids for c in again.choices]
    assert len({c.token_ids for c in three.choices}) == 3
    assert three.token_ids == single.token_ids and three.seed == 2**64 - 1
    assert three.usage.completion_tokens == 24 and three.usage.prompt_tokens == 99


async def test_packed_messages_hold_what_single_ones_do(served: Served) -> None:
    request = g.GenerateRequest(input=ids(1, 2), max_tokens=6, ignore_eos=True, sampling=g.Sampling(temperature=1.0))
    request.seed = 3
    single = await collect(served.generation.Generate(request))
    request.packed = True
    packed = await collect(served.generation.Generate(request))
    assert packed[0].WhichOneof("output") == "started"
    assert packed[-1].further[-1].WhichOneof("output") == "completed", "it comes with the last tokens"
    assert not any(message.further for message in single)
    several = [[output for message in packed for output in read_outputs(message)], [read_output(m) for m in single]]
    completions = []
    for outputs in several:
        builder = CompletionBuilder()
        builder.add(outputs)
        completions.append(builder.completion())
    assert completions[0].token_ids == completions[1].token_ids and len(completions[0].token_ids) == 6


async def test_a_random_seed_is_chosen_and_returned(served: Served) -> None:
    request = g.GenerateRequest(input=ids(1, 2), max_tokens=6, ignore_eos=True, sampling=g.Sampling(temperature=1.0))
    first = await collect(served.generation.Generate(request))
    request.seed = first[0].started.seed
    builders = []
    for _ in range(2):
        builder = CompletionBuilder()
        builder.add(read_output(m) for m in await collect(served.generation.Generate(request)))
        builders.append(builder.completion())
    assert builders[0].token_ids == builders[1].token_ids
    assert builders[0].token_ids == tuple(i for m in first for i in m.delta.token_ids)


async def test_create_if_missing_builds_once_and_refuses_other_content(served: Served) -> None:
    def request(content: tuple[int, ...]) -> g.GenerateRequest:
        create = prefix_pb2.CreatePrefixRequest(input=ids(*content))
        return g.GenerateRequest(
            prefix="prefixes/auto", input=ids(3), max_tokens=3, ignore_eos=True, create_if_missing=create
        )

    results = await asyncio.gather(*(collect(served.generation.Generate(request(PROMPT))) for _ in range(4)))
    for messages in results:
        received = tuple(i for m in messages for i in m.delta.token_ids)
        assert received == expected_tokens((*PROMPT, 3), 3)
    assert served.engine.tokens_prefilled == len(PROMPT) + 4, "the prefix was built more than once"
    async with served.client() as client:
        assert (await client.get_prefix("auto")).use_count >= 4
        with pytest.raises(PrefixExists):
            await client._transport.run(_one(request(PROMPT[:-1])))


def _one(request: g.GenerateRequest):  # type: ignore[no-untyped-def]
    return (yield Call("GenerationService", "GenerateUnary", g.GenerateUnaryRequest(generation=request)))


async def test_a_prefix_binds_the_loops_of_its_decodes(served: Served) -> None:
    async with served.client() as client:
        await client.create_prefix("deep", PROMPT, loops=5)
        assert await client.generate_from_prefix_cache("deep", 3, loops=5, ignore_eos=True)
        with pytest.raises(LoopsMismatch, match=r"5.*4|4.*5"):
            await client.generate_from_prefix_cache("deep", 3, loops=4)
        with pytest.raises(PrefixNotFound):
            await client.generate_from_prefix_cache("nobody", 3)


async def test_many_streams_share_one_prefix_and_are_counted_once() -> None:
    engine = FakeEngine()
    async with serving(engine) as served, served.client() as client:
        await client.create_prefix("p", PROMPT)
        suffixes = [(i, i + 1) for i in range(1, 41)]
        completions = await client.complete_batch("p", suffixes, max_tokens=6, ignore_eos=True)
        for suffix, completion in zip(suffixes, completions, strict=True):
            assert completion.token_ids == expected_tokens((*PROMPT, *suffix), 6)
            assert completion.usage.cached_tokens == len(PROMPT)
        counters = served.scheduler.counters
        assert engine.tokens_prefilled == len(PROMPT) + 2 * len(suffixes)
        assert counters.prompt_hits + counters.prompt_misses == sum(c.usage.prompt_tokens for c in completions)


async def test_eos_as_the_first_token_is_an_empty_answer() -> None:
    """T15, for one choice that ends at once beside one that goes on."""

    def next_token(opened: Open, position: int, token: int) -> int:
        return 0 if opened.sampling is not None and opened.sampling.choice == 0 else token or 1

    request = g.GenerateRequest(input=ids(*PROMPT), max_tokens=5, n=2, logprobs=1, seed=3)
    async with serving(FakeEngine(next_token=next_token), tokenizer=byte_tokenizer()) as served:
        unary = await served.generation.GenerateUnary(g.GenerateUnaryRequest(generation=request))
        empty, other = unary.choices
        assert (list(empty.token_ids), empty.text, list(empty.logprobs)) == ([], "", [])
        assert empty.finish_reason == g.FINISH_REASON_EOS and len(other.token_ids) == len(other.logprobs) == 5
        assert unary.usage.completion_tokens == 5
        messages = await collect(served.generation.Generate(request))
        assert not [m for m in messages if m.HasField("delta") and m.delta.choice == 0]
        (done,) = [m.completed for m in messages if m.HasField("completed") and m.completed.choice == 0]
        assert done.usage.completion_tokens == 0 and done.timings.HasField("ttft_duration")
        await served.settled()
