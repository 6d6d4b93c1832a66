"""The `tinyloop` command.

    serve                                         a server, in the foreground
    prefix create|get|list|update|delete|watch    named prefixes of a running server
    generate  model  top  load                    requests to a running server, what it is doing, and how much it can
    token new|hash|check                          who may call: tokens, and files of them
    init  inspect  bench                          model files, no server needed
    demo                                          all of it in ten seconds

Results go to standard output (`--json` for scripts), progress and errors to standard error.
Exit status: 0 done, 1 refused or failed (one line says why and what to do), 2 wrong usage, 130 Ctrl-C,
128 + number another signal.
"""

import os
import signal
import threading

INTERRUPTED = 130

# Ctrl-C while what commands need is imported, the better part of a second, is no error of anybody's: no traceback.
_meaning = signal.getsignal(signal.SIGINT)
_is_ours = _meaning is signal.default_int_handler and threading.current_thread() is threading.main_thread()
if _is_ours:
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
try:
    from tinyloop_service.cli.main import main
finally:
    if _is_ours:
        signal.signal(signal.SIGINT, _meaning)

__all__ = ["main"]
