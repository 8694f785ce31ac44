"""An HTTP client for the application in this process, and the fake engine behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI

from lightserve.config import HttpConfig
from lightserve.httpserver.app import build_app
from lightserve.httpserver.context import ServerContext
from test.httpserver.fake_engine import FakeEngine, Script, engine, spell


@dataclass(frozen=True)
class Served:
    http: httpx2.AsyncClient
    app: FastAPI
    context: ServerContext
    fake: FakeEngine

    async def get(self, path: str, **kwargs: Any) -> httpx2.Response:
        return await self.http.get(path, **kwargs)

    async def post(self, path: str, **kwargs: Any) -> httpx2.Response:
        return await self.http.post(path, **kwargs)


@asynccontextmanager
async def served(
    run_dir: Path, config: HttpConfig | None = None, script: Script | None = None
) -> AsyncIterator[Served]:
    async with engine(run_dir, script or spell("hi"), None, config) as (context, fake):
        app = build_app(context)
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield Served(http, app, context, fake)
