"""What sharing a prefix is worth, measured: prefill, decode steps, SHARED against NO_CACHE.

In: a model and an engine built from it.  Out: one frozen report, medians in milliseconds.  It refuses to know about
sockets: `direct` drives `engine.step(plan)` with nothing between, `run` goes through the scheduler, as the server does;
its rounds, and how a request is timed (`rounds`), are for any service behind the seam in `service`.

    prefill        the whole prefix, in chunks of the engine's size; its logits are kept
    decode step    one step of that many rows, all off one shared prefix; its share of a plan of `steps_at_once`
    SHARED(N)      one prefill, then N requests at once, `new_tokens` each
    NO_CACHE(N)    N requests, each with its own prefill, one after the other; measured up to `max_no_cache`, above
                   that N times the median request, and said so in `no_cache_scaled`
    predicted(N)   (P + D) / (P/N + D), P = prefill, D = new_tokens − 1 decode steps of one row
                   (a prefill gives the first token)
"""

from tinyloop_service.bench.machine import describe_machine, versions
from tinyloop_service.bench.rounds import Outcome, Run, run_no_cache, run_shared
from tinyloop_service.bench.run import Rounds, measure_rounds, no_cache_totals, run_bench
from tinyloop_service.bench.service import InProcess, Service
from tinyloop_service.bench.workload import Progress, Report, Workload, kv_memory_for, predicted_speedup, prompt_tokens

__all__ = [
    "InProcess",
    "Outcome",
    "Progress",
    "Report",
    "Rounds",
    "Run",
    "Service",
    "Workload",
    "describe_machine",
    "kv_memory_for",
    "measure_rounds",
    "no_cache_totals",
    "predicted_speedup",
    "prompt_tokens",
    "run_bench",
    "run_no_cache",
    "run_shared",
    "versions",
]
