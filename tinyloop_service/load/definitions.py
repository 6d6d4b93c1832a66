"""What the words under the numbers mean; printed wherever the numbers are, on a terminal and on the page."""

from __future__ import annotations

from tinyloop_service.load.results import Result, Way

DEFINITIONS: dict[str, str] = {
    "shared prefix": "Requests name a prefix that the server has built before, and send only what follows it.",
    "no sharing": "The same requests, each with the prefix's tokens as part of its own prompt.",
    "TTFT": "Time to first token: from the moment the schedule wanted the request sent to its first token. "
    "A server that stalls is not excused: requests that had to wait to be sent count their waiting.",
    "ITL": "Inter-token latency: the gap between two messages of a stream, divided by the tokens of the later one "
    "and counted once for each of them.",
    "TPOT": "Time per output token of one request: (last token − first token) / (tokens − 1).",
    "E2E": "From the moment the schedule wanted the request sent to its end.",
    "queue": "From the arrival at the server to admission, as the server measured it; includes building a prefix that "
    "was missing.",
    "gap": "The gap between two messages, not divided: how long a reader saw nothing new.",
    "p50, p95": "Of 100 requests (ITL: tokens), 50 or 95 needed at most so long.",
    "goodput": "Requests completed per second within every bound of the SLO (service level objective). The bound on "
    "ITL is for a request's own TPOT.",
    "cached": "Share of the prompt tokens of completed requests that were read from a prefix, not computed.",
    "knee": "The highest load before tokens per second stop following the load.",
    "break-even": "N = build / (cold − warm): the time a prefix takes to build / the time that a request off it saves. "
    "From so many requests on a build pays.",
    "lag": "How late the harness itself sent requests and heard answers. Above a fifth of what it measured, neither "
    "latencies nor goodput are reported.",
}


def used(result: Result) -> dict[str, str]:
    """Those that a result has numbers for."""
    left_out = {
        *(() if result.of_way(Way.SHARED) else ("shared prefix",)),
        *(() if result.of_way(Way.NO_SHARE) else ("no sharing",)),
        *(() if result.sweeps else ("knee",)),
        *(() if result.metadata.slo is not None else ("goodput",)),
        *(() if result.economy is not None else ("break-even",)),
    }
    return {term: meaning for term, meaning in DEFINITIONS.items() if term not in left_out}
