"""Who calls: decided here, once for every call, and read by servicers from `caller()`.

    authorization: Bearer TOKEN ──► Authenticate ──► Caller(tenant, rights) ──► caller() in the servicer
                                         └──► refused before the request is even parsed: no token, one that
                                              nobody knows, or one that lacks the right

    right      allows
    (any)      one's own prefixes: get, list, watch; the model; tokenize and detokenize; one's own load
    generate   Generate, GenerateUnary
    build      create, update and delete one's own prefixes, also by `create_if_missing`
    admin      the load of the whole server; reflection, where it is switched on

No right reaches another tenant's prefixes: whoever names one is answered as if there were none.  Without a tokens file
everybody is the tenant "" and has every right.  Health is told to anybody: who watches it has no token.
"""

from __future__ import annotations

from typing import Any

import grpc
import structlog

from tinyloop_service.errors import TinyLoopError, Unauthenticated
from tinyloop_service.observer import Observer
from tinyloop_service.rpc.boundary import PACKAGE, Context, answering
from tinyloop_service.rpc.caller import Caller, Right, set_caller
from tinyloop_service.rpc.tokens import TokensFile, bearer_token

RIGHTS: dict[str, Right | None] = {
    "/tinyloop.v1.PrefixService/CreatePrefix": Right.BUILD,
    "/tinyloop.v1.PrefixService/UpdatePrefix": Right.BUILD,
    "/tinyloop.v1.PrefixService/DeletePrefix": Right.BUILD,
    "/tinyloop.v1.PrefixService/GetPrefix": None,
    "/tinyloop.v1.PrefixService/ListPrefixes": None,
    "/tinyloop.v1.PrefixService/WatchPrefix": None,
    "/tinyloop.v1.GenerationService/Generate": Right.GENERATE,
    "/tinyloop.v1.GenerationService/GenerateUnary": Right.GENERATE,
    "/tinyloop.v1.ModelService/GetModel": None,
    "/tinyloop.v1.ModelService/GetLoad": None,
    "/tinyloop.v1.ModelService/Tokenize": None,
    "/tinyloop.v1.ModelService/Detokenize": None,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Right.ADMIN,
}

_OPEN = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")


class Authenticate(grpc.aio.ServerInterceptor):
    """Lets a call through if its token allows it, and remembers whose it is."""

    def __init__(self, tokens: TokensFile, observer: Observer) -> None:
        self._tokens = tokens
        self._observer = observer

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method in _OPEN:
            return await continuation(handler_call_details)
        try:
            known = self._identify(handler_call_details.invocation_metadata or ())
            set_caller(known)  # gRPC runs the handler in this same task
            if (right := RIGHTS.get(method)) is not None:
                known.require(right)
        except TinyLoopError as error:
            return self._refusal(error, method)
        return await continuation(handler_call_details)

    def _identify(self, metadata: Any) -> Caller:
        """Raises Unauthenticated."""
        given = [value for key, value in metadata if key == "authorization"]
        token = bearer_token(given[0]) if len(given) == 1 else ""
        if not token:
            raise Unauthenticated("a token is needed; send it as `authorization: Bearer TOKEN`, once")
        known = self._tokens.tokens.caller(token)
        if known is None:
            raise Unauthenticated("the token is none of this server's, or not any more")
        structlog.contextvars.bind_contextvars(token=known.token_id)
        return known

    def _refusal(self, error: TinyLoopError, method: str) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler for any kind of call, which reads nothing of it."""
        is_ours = method in RIGHTS and method.startswith(f"/{PACKAGE}.")
        name = method.removeprefix(f"/{PACKAGE}.") if is_ours else "Unknown/Unknown"  # no words of strangers in labels

        async def refuse(requests: object, context: Context) -> None:
            async with answering(context, name, self._observer):
                raise error

        return grpc.stream_stream_rpc_method_handler(refuse)
