"""Processes that speak gRPC in front of the engine's, so that it has the time for engine and scheduler alone.

    caller ──HTTP/2, TLS──► front: bytes in, bytes out ──pipe──► the engine's process: who calls, servicers, scheduler
    caller ──HTTP/2, TLS──► front                      ──pipe──►

    pipe.py       what the two sides say to each other
    relay.py      a front's side of a call: bytes on, what comes back to the caller; front.py at the top wires it
    shapes.py     how many messages a method takes and gives, all that a front knows of it
    answering.py  the engine's side of a call: to handlers it looks as grpc.aio's would
    claim.py      keeps their port
    fleet.py      starts fronts, looks after them, starts one anew that has ended, stops them, or takes over from them

`rpc/server.py` puts a fleet where a gRPC server would be.  A front knows methods by name and nothing of what they say.
All listen on one port, and the kernel gives each new connection to one of them.
"""
