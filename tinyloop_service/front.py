"""The wiring of a front, a process that speaks gRPC before the engine's (rpc/fronts): pipe → relay → gRPC server.

    python -m tinyloop_service.front --listen ADDRESS ... --fd FD

is started by the engine's process, with one end of a socket pair as FD; where it listens it is told through that, and
the command line has it for who looks at processes.  It ends when that process tells it to, or is gone; signals, which a
terminal or a supervisor sends to all processes of a group, are for that one to answer.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import socket
import sys

import grpc

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.observe.logs import configure_logging, settle_log
from tinyloop_service.rpc.addresses import bind, serving_options
from tinyloop_service.rpc.fronts.pipe import Down, Event, Pipe, Up
from tinyloop_service.rpc.fronts.relay import Relay
from tinyloop_service.rpc.tls import server_credentials
from tinyloop_service.signals import ENDING, ignore_signals


async def _run(end: socket.socket) -> None:
    orders: asyncio.Queue[Event] = asyncio.Queue()

    def receive(event: Event) -> None:
        match event[0]:
            case Down.LISTEN | Down.STOP:
                orders.put_nowait(event)
            case Down.ASK:
                pipe.send(Up.WELL)
            case Down.CALLERS:
                relay.set_callers(event[1])
            case _:
                relay.take(event)

    pipe = Pipe(receive, lost=_leave)
    relay = Relay(pipe)
    await pipe.open(end)
    _, addresses, pickled = await orders.get()
    settings, pems = pickle.loads(pickled)
    configure_logging(settings)
    server = grpc.aio.server(options=serving_options(settings, shared_port=True))
    server.add_generic_rpc_handlers((relay,))
    try:
        credentials = server_credentials(settings, pems)
        for address in addresses:
            bind(server, address, credentials)
    except InvalidArgument as error:
        pipe.send(Up.REFUSED, error.field, error.description)
    except RuntimeError:
        pipe.send(Up.REFUSED, "listen", f"cannot listen on {address}, for the reason that gRPC gave")
    else:
        await server.start()
        gc.collect()
        gc.freeze()  # looking through what stays would hold up every stream
        pipe.send(Up.LISTENING)
    _, grace_s = await orders.get()
    await server.stop(grace_s)
    pipe.close()
    await orders.get()  # the pipe's end is this process's


def _leave() -> None:
    """The pipe is closed, or the engine's process gone: nobody could answer any more."""
    settle_log()
    os._exit(0)


def main() -> None:
    ignore_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # whoever starts this blocks them, until here
    asyncio.run(_run(socket.socket(fileno=int(sys.argv[-1]))))


if __name__ == "__main__":
    main()
