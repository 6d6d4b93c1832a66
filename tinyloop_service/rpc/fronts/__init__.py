"""Processes that speak gRPC in front of the engine's, so that it has the time for engine and scheduler alone.

    caller ──HTTP/2, TLS──► front: bytes in, bytes out ──pipe──► the engine's process: who calls, servicers, scheduler
    caller ──HTTP/2, TLS──► front                      ──pipe──►

    pipe.py      what the two sides say to each other
    process.py   a front: takes calls, hands their bytes on, sends what comes back
    answering.py the engine's side of a front's calls: to handlers a call looks as grpc.aio's would
    fleet.py     starts fronts, starts one anew that ended, stops them

A front knows methods by name and nothing of what they say.  All listen on one port, and the kernel gives each new
connection to one of them.
"""
