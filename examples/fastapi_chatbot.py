"""A chatbot backend: one engine in the web process, replies streamed as server-sent events.

Run: python examples/fastapi_chatbot.py, which needs fastapi and uvicorn, and once it says that it runs:
curl -N localhost:8000/chat -H "x-tenant: acme" -H "x-user: u1" -H "content-type: application/json" \
    -d '{"stream": true, "messages": [{"role": "user", "content": "Hello!"}]}'
"""

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse

from prefixkv import AsyncEngine, Engine, Principal, SamplingParams, errors

STATUS = {"InvalidRequest": 400, "UnknownTenant": 403, "ContextOverflow": 413, "QueueFull": 429, "QuotaExceeded": 507}


def authenticate(x_tenant: str = Header(""), x_user: str = Header(""), x_session: str = Header("")) -> Principal:
    if not x_tenant:  # stands in for real authentication: clients must not be able to name their own tenant
        raise HTTPException(401, "no tenant")
    return Principal(x_tenant, user=x_user or None, session=x_session or None)


async def to_events(stream: Any, delta: Any) -> AsyncIterator[str]:
    async with stream:  # a client that goes away ends this generator, and that cancels the request
        while delta is not None:
            yield f"data: {json.dumps({'text': delta.text, 'usage': delta.usage and asdict(delta.usage)})}\n\n"
            delta = await anext(stream, None)


def create_app(engine: AsyncEngine) -> FastAPI:
    app = FastAPI()

    @app.exception_handler(errors.PrefixKVError)
    async def refuse(request: Request, error: errors.PrefixKVError) -> JSONResponse:
        kind = type(error).__name__
        return JSONResponse({"error": kind, "detail": str(error)}, STATUS.get(kind, 503))

    @app.post("/chat")
    async def chat(body: dict[str, Any], principal: Principal = Depends(authenticate)) -> Any:
        messages = body.get("messages", [])  # the engine checks what is in them
        sampling = SamplingParams(max_tokens=body.get("max_tokens", 128))
        if not body.get("stream"):
            result = await engine.chat(messages, principal=principal, sampling=sampling)
            return {"message": result.message, "usage": asdict(result.usage)}
        stream = engine.stream(messages, principal=principal, sampling=sampling)
        first = await anext(stream)  # a refusal comes here, while the status can still say so
        return StreamingResponse(to_events(stream, first), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    with Engine.from_pretrained("demo") as engine:
        uvicorn.run(create_app(AsyncEngine.from_engine(engine)))
