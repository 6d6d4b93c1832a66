"""The command tree, and the one place where an exception becomes an exit status."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

import click

from tinyloop_service.cli import INTERRUPTED, output
from tinyloop_service.cli.bench import bench
from tinyloop_service.cli.commands import Commands
from tinyloop_service.cli.demo import demo
from tinyloop_service.cli.evaluate import evaluate
from tinyloop_service.cli.generate import generate
from tinyloop_service.cli.load import load
from tinyloop_service.cli.model import init, inspect, model
from tinyloop_service.cli.prefix import prefix
from tinyloop_service.cli.quantize import convert, quantize
from tinyloop_service.cli.serve import serve
from tinyloop_service.cli.token import token
from tinyloop_service.cli.top import top
from tinyloop_service.errors import TinyLoopError, Unauthenticated, Unavailable

_WAYS_OUT = {
    Unavailable: "; is it running, and does it speak TLS (--tls-ca)?  Start one with `tinyloop serve`, or name another "
    "with --target",
    Unauthenticated: "; set TINYLOOP_TOKEN, or give --token-file",
}
_SPECIAL_WAYS_OUT = {  # by what the clients say of a stream, and gRPC of a handshake
    "the connection to the server was lost": "; run it again once the server is back",
    "the answer was cut off": "; run it again once the server is back",
    "WRONG_VERSION_NUMBER": "; it does not speak TLS: leave out --tls, --tls-ca and their variables",
    "CERTIFICATE_VERIFY_FAILED": "; its certificate is signed by none of those trusted: give who signed it by --tls-ca",
    "Hostname Verification Check failed": "; its certificate is for other names: use one of them in --target",
}


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tinyloop-service", prog_name="tinyloop")
def group() -> None:
    """TinyLoop: build a named prefix of a looped language model once, decode many requests from it at once.

    \b
    A first session, in two terminals:
      tinyloop serve                                          # the demo model on 127.0.0.1:50051
      tinyloop prefix create genesis "In the beginning God created the heaven and the earth."
      tinyloop generate --prefix genesis " And God said"

    Or all of it in ten seconds: tinyloop demo
    """


for command in (
    serve,
    token,
    prefix,
    generate,
    model,
    top,
    load,
    init,
    inspect,
    quantize,
    convert,
    evaluate,
    bench,
    demo,
):
    group.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; always leaves through SystemExit."""
    if sys.stderr is not None and not faulthandler.is_enabled():
        # A crash of native code says where it was; to read other threads as they run might be a second one.
        faulthandler.enable(all_threads=False)
    sys.exit(_status(arguments))


def _status(arguments: list[str] | None) -> int:
    try:
        result = group.main(args=arguments, prog_name="tinyloop", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (click.Abort, KeyboardInterrupt):
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))  # a second one does not wait for gRPC's threads
        return INTERRUPTED
    except click.ClickException as error:  # usage errors among them, which print how to get help
        error.show()
        return error.exit_code
    except BrokenPipeError:  # `tinyloop ... | head`: whoever read is content
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (TinyLoopError, ValueError) as error:
        output.print_error(f"{error}{_way_out(error)}")
        return 1
    except OSError as error:
        output.print_error(_file_trouble(error))
        return 1


def _way_out(error: Exception) -> str:
    """What to do about an error of a connection; nothing for those that say it themselves."""
    way = _WAYS_OUT.get(type(error), "")
    return next((way for sign, way in _SPECIAL_WAYS_OUT.items() if sign in str(error)), way) if way else ""


def _file_trouble(error: OSError) -> str:
    """What the system said, without its number."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}; check the path"
