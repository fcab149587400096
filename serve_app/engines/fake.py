"""A scripted engine with vLLM's HTTP surface, for what cannot be had on a small machine.

`EngineSpec.args` is the script (all times in seconds); every field may be overridden for one request by the
text `fake[field=value,...]` in its last message:

    load_s         how long the load takes                  memory_mb    memory it really takes
    fail_load      a message: the load fails with it        hang_load    the load never ends
    sleep_s        how long falling asleep takes            wake_s       how long waking takes
    fail_sleep, fail_wake  a message: it fails with it      hang_sleep, hang_wake  it never ends
    ttft_s, tpot_s time to first token, per token after it  tokens       length of an answer
    text           the answer, one token a word             reasoning    text in the reasoning field
    call           a tool: a chat ends with a call of it, without arguments
    kv_places      requests whose KV cache fits at once; the others wait in the engine (0: all fit)
    fail_at        raise at this token (0: before any)      die_at       end the process at this token
    wedge_at       the engine hangs at this token, with all its requests
    stall_at       stop for ever at this token              cut          write SSE in pieces of this many bytes

Every reply has the body that it got in `fake_request`, so that a test sees what reached the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import re
import signal
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serve_app.engines.base import EngineLoad, EngineSpec, Phase, ReportPhase, ServedApp
from serve_app.model_schema import FakeScript

_OVERRIDE = re.compile(r"fake\[([^\]]*)\]")


class Script(FakeScript):
    """How a fake engine behaves; see the module."""

    def for_request(self, body: dict[str, Any]) -> Script:
        """The script with what this request asks for in `fake[...]`."""
        found = _OVERRIDE.search(_last_text(body))
        if not found:
            return self
        types: dict[str, Any] = {name: type(field.default) for name, field in Script.model_fields.items()}
        pairs = [part.split("=", 1) for part in found[1].split(",") if "=" in part]
        return self.model_copy(update={key: types[key](value) for key, value in pairs if key in types})

    def words(self, limit: int) -> list[str]:
        """The answer as tokens, at most `limit`."""
        words = self.text.split(" ") if self.text else [f"t{i:03d}" for i in range(self.tokens)]
        return [word if i == 0 else " " + word for i, word in enumerate(words)][:limit]


def _last_text(body: dict[str, Any]) -> str:
    messages = body.get("messages")
    content = messages[-1].get("content") if messages else body.get("prompt")
    return content if isinstance(content, str) else orjson.dumps(content).decode()


def preload() -> None:
    """Nothing to import."""


@asynccontextmanager
async def serve(spec: EngineSpec, report: ReportPhase) -> AsyncIterator[ServedApp]:
    """Run the script. See `base.Runtime`."""
    script = Script(**spec.args)
    report(Phase.CONFIGURING)
    report(Phase.LOADING)
    ballast = os.urandom(1 << 20) * script.memory_mb
    await _scripted(script.load_s, script.fail_load, hang=script.hang_load)
    report(Phase.WARMING)
    fake = _FakeServer(spec.model_id, script)

    async def sleep(level: int) -> None:
        nonlocal ballast
        await _scripted(script.sleep_s, script.fail_sleep, hang=script.hang_sleep)
        ballast = b""

    async def wake() -> None:
        nonlocal ballast
        await _scripted(script.wake_s, script.fail_wake, hang=script.hang_wake)
        ballast = os.urandom(1 << 20) * script.memory_mb

    yield ServedApp(
        app=fake.app(),
        dead=lambda: False,
        attach_server=lambda server: None,
        sleep=sleep,
        wake=wake,
        load=fake.scheduler.load,
        steps=lambda: fake.scheduler.steps,
        probe=fake.scheduler.step,
    )
    del ballast


async def _scripted(seconds: float, failure: str, *, hang: bool) -> None:
    if hang:
        await asyncio.Event().wait()
    await asyncio.sleep(seconds)
    if failure:
        raise RuntimeError(failure)


class _Scheduler:
    """Lets as many requests run as have room in the KV cache, each taking the same part of it."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._room = asyncio.Semaphore(places or 1 << 30)
        self._running = self._waiting = 0
        self.steps = 0
        self._goes = asyncio.Event()
        self._goes.set()

    def wedge(self) -> None:
        self._goes.clear()

    async def step(self) -> None:
        await self._goes.wait()
        self.steps += 1

    def load(self) -> EngineLoad:
        return EngineLoad(self._running / self._places if self._places else 0.0, self._running, self._waiting)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        self._waiting += 1
        try:
            await self._room.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._room.release()


class _FakeServer:
    def __init__(self, model_id: str, script: Script) -> None:
        self.model_id, self.script = model_id, script
        self.scheduler = _Scheduler(script.kv_places)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", lambda request: Response()),
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.generate, methods=["POST"]),
                Route("/v1/completions", self.generate, methods=["POST"]),
                Route("/v1/messages", self.generate, methods=["POST"]),
                Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        card = {"id": self.model_id, "object": "model", "created": int(time.time()), "owned_by": "switchyard"}
        return JSONResponse({"object": "list", "data": [{**card, "max_model_len": self.script.context}]})

    async def generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        try:
            script = self.script.for_request(body)
        except ValueError as error:
            return _error(400, f"fake[...]: {error}", "BadRequestError")
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or script.context
        if limit > script.context:
            return _error(400, f"This model's maximum context length is {script.context} tokens.", "BadRequestError")
        kind = _MessagesReply if request.url.path == "/v1/messages" else _Reply
        reply = kind("messages" in body, body, self.model_id, script, limit, self.scheduler)
        if body.get("stream"):
            return StreamingResponse(_pieces(reply.stream(), script.cut), media_type="text/event-stream")
        return await self._whole(request, reply)

    async def count_tokens(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        return JSONResponse({"input_tokens": len(str(body["messages"]).split()), "fake_request": body})

    async def _whole(self, request: Request, reply: _Reply) -> Response:
        """As vLLM does: a client that leaves ends the generation."""
        answer = asyncio.ensure_future(reply.whole())
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else Response(status_code=499)
        finally:
            answer.cancel()
            gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclasses.dataclass(slots=True)
class _Reply:
    chat: bool
    body: dict[str, Any]
    model: str
    script: Script
    limit: int
    scheduler: _Scheduler

    async def tokens(self) -> AsyncIterator[str]:
        async with self.scheduler.turn():
            async for token in self._generated():
                yield token

    async def _generated(self) -> AsyncIterator[str]:
        words = self.script.words(self.limit)
        for index, word in zip(itertools.count(), [*words, None]):
            if index == self.script.die_at:
                os.killpg(os.getpgrp(), signal.SIGKILL)
            if index == self.script.stall_at:
                await asyncio.Event().wait()
            if index == self.script.fail_at:
                raise RuntimeError("scripted failure")
            if word is None:
                return
            await asyncio.sleep(self.script.tpot_s if index else self.script.ttft_s)
            if index == self.script.wedge_at:
                self.scheduler.wedge()
            await self.scheduler.step()
            yield word

    @property
    def finish_reason(self) -> str:
        if len(self.script.words(1 << 30)) > self.limit:
            return "length"
        return "tool_calls" if self.calls else "stop"

    @property
    def calls(self) -> list[dict[str, Any]]:
        function = {"name": self.script.call, "arguments": "{}"}
        return [{"id": "call-0", "type": "function", "function": function}] if self.script.call and self.chat else []

    def frame(self, kind: str) -> dict[str, Any]:
        name = "chat.completion" if self.chat else "text_completion"
        suffix = kind if self.chat else ""
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": name + suffix,
            "created": int(time.time()),
            "model": self.model,
        }

    def usage(self, count: int) -> dict[str, Any]:
        prompt = len(str(self.body.get("messages") or self.body.get("prompt")).split())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
            "completion_tokens_details": {"reasoning_tokens": len(self.script.reasoning.split())},
        }

    async def whole(self) -> Response:
        try:
            words = [word async for word in self.tokens()]
        except RuntimeError as error:
            return _error(500, str(error), "InternalServerError")
        text = "".join(words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish_reason, "logprobs": None}
        if self.chat:
            choice["message"] = {
                "role": "assistant",
                "content": text,
                "reasoning": self.script.reasoning or None,
                "tool_calls": self.calls,
            }
        else:
            choice["text"] = text
        return JSONResponse(
            {
                **self.frame(""),
                "choices": [choice],
                "usage": self.usage(len(words)),
                "fake_request": self.body,
            }
        )

    async def stream(self) -> AsyncIterator[bytes]:
        frame = self.frame(".chunk")
        count = 0

        def event(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
            content = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
            choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
            return b"data: " + orjson.dumps({**frame, "choices": [choice], **more}) + b"\n\n"

        try:
            async for word in self.tokens():
                if count == 0 and self.chat:
                    yield event({"role": "assistant", "content": ""}, fake_request=self.body)
                    if self.script.reasoning:
                        yield event({"reasoning": self.script.reasoning})
                count += 1
                yield event({"content": word})
            for index, call in enumerate(self.calls):
                yield event({"tool_calls": [{"index": index, **call}]})
            yield event({}, self.finish_reason)
            if (self.body.get("stream_options") or {}).get("include_usage"):
                yield b"data: " + orjson.dumps({**frame, "choices": [], "usage": self.usage(count)}) + b"\n\n"
        except RuntimeError as error:
            failure = {"message": str(error), "type": "InternalServerError", "param": None, "code": 500}
            yield b"data: " + orjson.dumps({"error": failure}) + b"\n\n"
        yield b"data: [DONE]\n\n"


class _MessagesReply(_Reply):
    """The same in Anthropic's form."""

    def message(self, content: list[dict[str, Any]], stop: str | None, count: int) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.model,
            "stop_reason": stop,
            "stop_sequence": None,
            "usage": self.tokens_used(count),
            "fake_request": self.body,
        }

    def tokens_used(self, count: int) -> dict[str, int]:
        return {"input_tokens": self.usage(count)["prompt_tokens"], "output_tokens": count}

    @property
    def stop_reason(self) -> str:
        return "max_tokens" if self.finish_reason == "length" else "end_turn"

    async def whole(self) -> Response:
        try:
            words = [word async for word in self.tokens()]
        except RuntimeError as error:
            content = {"type": "error", "error": {"type": "InternalServerError", "message": str(error)}}
            return JSONResponse(content, status_code=500)
        thought = {"type": "thinking", "thinking": self.script.reasoning, "signature": "0"}
        blocks = [thought] if self.script.reasoning else []
        blocks.append({"type": "text", "text": "".join(words)})
        return JSONResponse(self.message(blocks, self.stop_reason, len(words)))

    async def stream(self) -> AsyncIterator[bytes]:
        def event(kind: str, **fields: Any) -> bytes:
            return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **fields}) + b"\n\n"

        pieces = [("thinking", self.script.reasoning)] if self.script.reasoning else []
        index = count = 0
        try:
            async for word in self.tokens():
                if not count:
                    yield event("message_start", message=self.message([], None, 0))
                    for kind, text in pieces:
                        yield event("content_block_start", index=index, content_block={"type": kind, kind: ""})
                        yield event("content_block_delta", index=index, delta={"type": f"{kind}_delta", kind: text})
                        yield event("content_block_stop", index=index)
                        index += 1
                    yield event("content_block_start", index=index, content_block={"type": "text", "text": ""})
                count += 1
                yield event("content_block_delta", index=index, delta={"type": "text_delta", "text": word})
            yield event("content_block_stop", index=index)
            delta = {"stop_reason": self.stop_reason, "stop_sequence": None}
            yield event("message_delta", delta=delta, usage=self.tokens_used(count))
        except RuntimeError as error:
            yield event("error", error={"type": "internal_error", "message": str(error)})
            return
        yield event("message_stop")


async def _pieces(stream: AsyncIterator[bytes], size: int) -> AsyncIterator[bytes]:
    async for event in stream:
        if not size:
            yield event
            continue
        for start in range(0, len(event), size):
            yield event[start : start + size]
            await asyncio.sleep(0)


def _error(status: int, message: str, kind: str) -> Response:
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status_code=status
    )
