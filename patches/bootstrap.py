"""What a prefill's launcher publishes: where relays and main servers find it. Its bootstrap server runs there."""

from __future__ import annotations

from typing import Any

from sglang_pdd.config import PddConfig
from sglang_pdd.keys import Keys
from sglang_pdd.protocol import PROTOCOL


def add_route(_: None, server: Any) -> None:
    """After ``CommonKVBootstrapServer._setup_routes``: GET /pdd tells relays and main servers where to say Hello."""
    from aiohttp import web

    config = PddConfig.from_env()
    answer = {
        "protocol": PROTOCOL,
        "endpoint": config.endpoint,
        "public_key": Keys.load(config.keys).public if config.keys else "",
    }

    async def get_pdd(request: web.Request) -> web.Response:
        return web.json_response(answer)

    server.app.router.add_get("/pdd", get_pdd)
