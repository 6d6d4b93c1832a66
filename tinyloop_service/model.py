"""The in-process API: a model, its prefix caches, and generation, with nothing between but the scheduler.

In: a `.tinyloop` file and what a user writes: ids, arrays, text.  Out: lists of ids, `Completion`, `Delta`.
It refuses to know how a request is scheduled or computed: it validates, tokenises, and hands over.

    your threads ──► Model ──► Runtime: one event loop in one thread ──► Scheduler ──► engine thread

Any number of threads may call at once; their requests run as rows of the same steps.  A prefix and a suffix are
tokenised separately: text that is one prompt elsewhere may have other ids when it is cut in two.
"""

from __future__ import annotations

import asyncio
import copy
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tinyloop_service import arguments
from tinyloop_service.arguments import Parameters, Prompt, Stop
from tinyloop_service.completion import Completion, CompletionBuilder, Delta, DeltaReader
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.loading import load_model
from tinyloop_service.runtime import Runtime, close_elsewhere
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.scheduler.stream import Stream
from tinyloop_service.settings import EngineSettings, SchedulerSettings
from tinyloop_service.types import CacheMode, GenerationRequest, PrefixDefinition, PrefixInfo, TokenIds


class PrefixCache:
    """The state of a prefix at every loop, held by this handle and freed when the handle is collected.

    Made by `Model.build_prefix_cache`; of use only to the Model that built it.
    """

    def __init__(self, runtime: Runtime, info: PrefixInfo) -> None:
        self._runtime = runtime
        self._info = info
        weakref.finalize(self, runtime.release, info.uid).atexit = False

    @property
    def prompt(self) -> NDArray[np.int32]:
        """A copy of the prefix's token ids, BOS included."""
        return np.array(self._info.tokens, np.int32)

    @property
    def loops(self) -> int:
        return self._info.loops

    @property
    def cache_window(self) -> int:
        """Tokens a position reads, its own included; 0: all."""
        return self._info.cache_window

    @property
    def num_bytes(self) -> int:
        """Stored bytes of its pages."""
        return self._info.size_bytes

    @property
    def uid(self) -> str:
        return self._info.uid

    def __repr__(self) -> str:
        return f"PrefixCache({len(self._info.tokens)} tokens, loops={self.loops}, uid={self.uid!r})"


class Model:
    """A looped model in this process.  A context manager; `close` gives back its threads and memory.

    engine       "auto" (a GPU if there is one that can), "cuda" or "cpu"
    kv_memory    bytes for the state of prefixes and requests; None: the engine's default
    cache_mode   how state is stored: "fp16", "int8", "h-fp16", "h-int8" or "h-int4", from large to small
    threads      of the CPU engine; None: one per core, one for a small model

    Raises ModelFileError (a ValueError) for what is not a whole TinyLoop model, OSError if it cannot be opened.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        engine: str = "auto",
        kv_memory: int | None = None,
        cache_mode: CacheMode | str = CacheMode.FP16,
        threads: int | None = None,
    ) -> None:
        settings = EngineSettings(engine=engine, kv_memory=kv_memory, cache_mode=CacheMode(cache_mode), threads=threads)
        loaded = load_model(path, settings)
        self._config = dict(loaded.config)
        self._tokenizer = loaded.tokenizer
        self._vocab_size, self._max_loops = loaded.engine.limits.vocab_size, loaded.engine.limits.max_loops
        self._parameters = partial(arguments.parameters, vocab_size=self._vocab_size, max_loops=self._max_loops)
        self._runtime = Runtime(Scheduler(loaded.engine, SchedulerSettings(), tokenizer=self._tokenizer))
        self._forgotten = weakref.finalize(self, close_elsewhere, self._runtime)  # when collected, and at exit

    def config(self) -> dict[str, Any]:
        """The config keys of the model file."""
        self._runtime.check_open()
        return copy.deepcopy(self._config)

    def build_prefix_cache(self, prompt: Prompt, loops: int | None = None, cache_window: int = 0) -> PrefixCache:
        """Prefill `prompt` once, at depth `loops`, default the model's; with cache_window > 0, windowed attention.

        Raises ValueError naming the field, RuntimeError when it is too long or does not fit in memory.
        """
        self._runtime.check_open()
        definition = PrefixDefinition(
            tokens=self._ids(arguments.prompt(prompt, vocab_size=self._vocab_size), bos=True),
            loops=arguments.loops(loops, max_loops=self._max_loops),
            cache_window=arguments.cache_window(cache_window),
        )
        scheduler = self._runtime.scheduler
        return PrefixCache(self._runtime, self._runtime.run(lambda: scheduler.create_prefix(definition)))

    def generate_from_prefix_cache(
        self,
        prefix: PrefixCache,
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
        parameters = self._parameters(
            max_tokens, loops, temperature, top_k, top_p, cache_window, repetition_penalty, stop_sequences,
            seed=seed, min_p=min_p, ignore_eos=ignore_eos,
        )  # fmt: skip
        request = self._request(None, prefix, suffix, parameters)
        return [*prefix._info.tokens, *request.tokens, *self._runtime.run(lambda: self._complete(request)).token_ids]

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
        parameters = self._parameters(
            max_tokens, loops, temperature, top_k, top_p, cache_window, repetition_penalty, stop_sequences,
            seed=seed, min_p=min_p, ignore_eos=ignore_eos,
        )  # fmt: skip
        request = self._request(prompt, None, (), parameters)
        return [*request.tokens, *self._runtime.run(lambda: self._complete(request)).token_ids]

    def complete(
        self, prompt: Prompt | None = None, *, prefix: PrefixCache | None = None, suffix: Prompt = (), **parameters: Any
    ) -> Completion:
        """Generate from `prompt`, or from `prefix` and `suffix`, and wait for all of it.

        `parameters` are those of `generate`, and logprobs, n, logit_bias, stop_token_ids.
        """
        request = self._request(prompt, prefix, suffix, self._parameters(**parameters))
        return self._runtime.run(lambda: self._complete(request))

    def complete_batch(self, prefix: PrefixCache, suffixes: Sequence[Prompt], **parameters: Any) -> list[Completion]:
        """One Completion per suffix, in order, all decoded at once.  `parameters` as in `complete`, alike for all."""
        requests = [self._request(None, prefix, suffix, self._parameters(**parameters)) for suffix in suffixes]

        async def all_at_once() -> list[Completion]:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._complete(request)) for request in requests]
            except BaseExceptionGroup as failed:  # the first refusal has cancelled the others
                raise failed.exceptions[0] from None
            return [task.result() for task in tasks]

        return self._runtime.run(all_at_once)

    def stream(
        self, prompt: Prompt | None = None, *, prefix: PrefixCache | None = None, suffix: Prompt = (), **parameters: Any
    ) -> DeltaStream:
        """As `complete`, piece by piece.  Refusals are raised here, not at the first piece."""
        request = self._request(prompt, prefix, suffix, self._parameters(**parameters))
        return DeltaStream(self._runtime, request)

    def close(self) -> None:
        """End what runs with its error and give everything back.  Afterwards: RuntimeError "model was closed"."""
        self._forgotten.detach()
        self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def _complete(self, request: GenerationRequest) -> Completion:
        builder = CompletionBuilder(request.n)
        async with self._runtime.scheduler.generate(request) as stream:
            async for outputs in stream:
                builder.add(outputs)
        return builder.completion()

    def _request(
        self, prompt: Prompt | None, prefix: PrefixCache | None, suffix: Prompt, parameters: Parameters
    ) -> GenerationRequest:
        self._runtime.check_open()
        if (prompt is None) == (prefix is None):
            raise InvalidArgument("prompt", "give either prompt, or prefix with an optional suffix")
        if prefix is not None:
            if not isinstance(prefix, PrefixCache) or prefix._runtime is not self._runtime:
                raise InvalidArgument("prefix", "is no PrefixCache of this Model; build it with build_prefix_cache")
            ids = self._ids(arguments.suffix(suffix, vocab_size=self._vocab_size), bos=False)
        elif arguments.suffix(suffix):
            raise InvalidArgument("suffix", "needs a prefix; append it to the prompt instead")
        else:
            ids = self._ids(arguments.prompt(prompt, vocab_size=self._vocab_size), bos=True)
        uid = prefix.uid if prefix is not None else None
        return parameters.request(ids, prefix_uid=uid, want_text=self._tokenizer is not None)

    def _ids(self, prompt: str | TokenIds, *, bos: bool) -> TokenIds:
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise InvalidArgument("prompt", "is text, but this model has no tokenizer; give token ids")
        return self._tokenizer.encode(prompt, bos=bos)


class DeltaStream(Iterator[Delta]):
    """The pieces of one request as they come.  Leaving it early, by `close` or by collection, cancels the request."""

    def __init__(self, runtime: Runtime, request: GenerationRequest) -> None:
        self._runtime = runtime
        self._reader = DeltaReader()
        self._ready: list[Delta] = []
        self._stream = runtime.run(lambda: _open(runtime.scheduler, request))
        self._finalizer = weakref.finalize(self, runtime.leave, self._stream)
        self._finalizer.atexit = False

    def __next__(self) -> Delta:
        while not self._ready:
            if not self._finalizer.alive:
                raise StopIteration
            try:
                outputs = self._runtime.run(self._stream.__anext__)
            except StopAsyncIteration:
                self.close()
                raise StopIteration from None
            except BaseException:
                self.close()
                raise
            self._ready = list(self._reader.read(outputs))
        return self._ready.pop(0)

    def close(self) -> None:
        self._finalizer()


async def _open(scheduler: Scheduler, request: GenerationRequest) -> Stream:
    return scheduler.generate(request)
