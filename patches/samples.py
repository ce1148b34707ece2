"""Several samples of one request: SGLang gives them all one bootstrap room, and its schedulers die of it."""

from __future__ import annotations

from typing import Any


def refuse(result: None, request: Any) -> None:
    """After ``GenerateReqInput.normalize_batch_and_arguments``: the client gets an error, and the server lives."""
    rooms = request.bootstrap_room if isinstance(request.bootstrap_room, list) else [request.bootstrap_room]
    if request.parallel_sample_num > 1 and any(room is not None for room in rooms):
        raise ValueError(
            f"n={request.parallel_sample_num}: SGLang 0.5.23 cannot disaggregate several samples of one request; "
            "send as many requests instead"
        )
