"""ModelService: facts about the model, how busy the server is, text to ids and back."""

from __future__ import annotations

from tinyloop_service.arguments import text as check_text
from tinyloop_service.pb import model_pb2, model_pb2_grpc
from tinyloop_service.rpc.backend import Backend
from tinyloop_service.rpc.boundary import Context
from tinyloop_service.rpc.caller import Right, caller
from tinyloop_service.rpc.convert import check_text_len, read_ids, write_tokens
from tinyloop_service.rpc.convert_model import write_load, write_model


class ModelService(model_pb2_grpc.ModelServiceServicer):  # type: ignore[misc]  # generated code has no types
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Context) -> model_pb2.Model:
        async with self._backend.answering(context, "ModelService/GetModel"):
            scheduler = self._backend.scheduler
            return write_model(
                scheduler.limits,
                self._backend.config,
                engine=scheduler.engine_name,
                replica=self._backend.replica,
                has_tokenizer=scheduler.tokenizer is not None,
            )

    async def GetLoad(self, request: model_pb2.GetLoadRequest, context: Context) -> model_pb2.Load:
        async with self._backend.answering(context, "ModelService/GetLoad"):
            everything = Right.ADMIN in caller().rights
            return write_load(self._backend.scheduler.load(None if everything else caller().tenant))

    async def Tokenize(self, request: model_pb2.TokenizeRequest, context: Context) -> model_pb2.TokenizeResponse:
        async with self._backend.answering(context, "ModelService/Tokenize"):
            self._backend.tokenizer("text")
            check_text_len(request.text, self._backend.limits)
            ids = await self._backend.encode(check_text(request.text, "text"), "text", bos=request.add_bos)
            return model_pb2.TokenizeResponse(tokens=write_tokens(ids))

    async def Detokenize(self, request: model_pb2.DetokenizeRequest, context: Context) -> model_pb2.DetokenizeResponse:
        async with self._backend.answering(context, "ModelService/Detokenize"):
            ids = read_ids(request.tokens, "tokens", self._backend.limits)
            return model_pb2.DetokenizeResponse(text=await self._backend.decode(ids, "tokens"))
