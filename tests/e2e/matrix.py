"""Which clusters the tests run on. The usual ones cover each value of each axis; the full run takes the product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from cluster import Cluster

# The KV of a prompt of COLD_TOKENS takes 1.6 s, that of a short one is across before a relay would pay. The answer has
# about twice as many tokens as a relay makes in that time on two free cores.
RATE = "30mbit"
SLOW_RATE = "12mbit"  # with two ranks: six schedulers on two cores can hold a LAN copy up for more than a second
COLD_TOKENS, ANSWER_TOKENS = 3000, 960
KV_BYTES = 2048  # of one token

USUAL = {
    "page1": Cluster(kind="pdd", page_size=1, overlap=True, router="rust", wan_rate_limit=RATE),
    "page16": Cluster(
        kind="pdd",
        page_size=16,
        overlap=False,
        router="mini-lb",
        wan_rate_limit=RATE,
        flags={"main": ("--pdd-handoff", "one-shot"), "prefill": ("--pdd-wan-transport", "engine")},
    ),
    "tp2": Cluster(kind="pdd", page_size=16, overlap=True, router="rust", tp=2, wan_rate_limit=SLOW_RATE),
}
FAULTS = {
    "faults": Cluster(
        kind="pdd",
        page_size=16,
        wan_rate_limit=RATE,
        flags={
            "prefill": ("--pdd-relay-policy", "always", "--chunked-prefill-size", "1024"),
            "relay": ("--pdd-max-relays", "1"),
        },
    )
}
_FEATURES = (
    *("--enable-custom-logit-processor", "--grammar-backend", "xgrammar", "--enable-cache-report"),
    *("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25"),
)


def _seam(*main: str, features: bool = False, env: Mapping[str, str] | None = None, **more: Any) -> Cluster:
    """A cluster for the `force` plugins. ``main``: more flags of MD's; ``features``: sampling seeds too."""
    common = (*_FEATURES, "--enable-deterministic-inference") if features else ()
    return Cluster(
        kind="pdd",
        router="mini-lb",  # the Rust router drops sampling parameters that it does not know
        flags={
            "prefill": ("--pdd-relay-policy", "always", *common),
            "relay": common,
            "main": ("--pdd-handoff", "catch-up", "--pdd-handoff-threshold", "4", *common, *main),
            "single": common,
        },
        env={"main": env or {}},
        **more,
    )


SEAM = {"seam": _seam(features=True)}
FULL_SEAM = {"full-seam-sync": _seam(features=True, overlap=False, page_size=16)}
# MD's kernels are others than P's and RLD's, and so is the number of its ranks.
NUMERICS = {"triton": _seam("--attention-backend", "triton", env={"TRITON_INTERPRET": "1"}, tps={"main": 2})}
# MD has room for a few requests, and takes one back now and then.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
TIGHT = {"tight": _seam("--max-total-tokens", "700", "--enable-priority-scheduling", env=RETRACT)}
WITH_FEATURES = (*SEAM, *FULL_SEAM)
WITH_FORCE = (*WITH_FEATURES, *NUMERICS, *TIGHT)
WITH_FLIP = ("faults",)
WITH_KEYS = ("faults",)


def _product() -> dict[str, Cluster]:
    clusters = {}
    for page, overlap, router, tp in product((1, 16), (True, False), ("rust", "mini-lb"), (1, 2)):
        rate = RATE if tp == 1 else SLOW_RATE
        spec = Cluster(kind="pdd", page_size=page, overlap=overlap, router=router, tp=tp, wan_rate_limit=rate)
        if spec not in (replace(usual, flags={}) for usual in USUAL.values()):
            clusters[f"full-page{page}-{'overlap' if overlap else 'sync'}-{router}-tp{tp}"] = spec
    return clusters


# SGLang sends a block of 256 bytes a token and layer then, and Mooncake over TCP takes its time for each: the copy to a
# relay of two ranks must still be there first.
_HETERO = replace(USUAL["tp2"], tp=1, wan_rate_limit=RATE)
_FOR_RLD2 = replace(_HETERO, wan_rate_limit="6mbit")
HETERO = {
    "full-hetero-md2": replace(_HETERO, tps={"main": 2}),
    "full-hetero-p2": replace(_HETERO, tps={"prefill": 2}),
    "full-hetero-rld2": replace(_FOR_RLD2, tps={"relay": 2}),
    "full-hetero-p2-rld2": replace(_HETERO, tps={"prefill": 2, "relay": 2}),
    "full-hetero-p2-md2": replace(_HETERO, tps={"prefill": 2, "main": 2}),
    "full-hetero-rld2-md2": replace(_FOR_RLD2, tps={"relay": 2, "main": 2}),
}
_BY_NIXL = ("--disaggregation-transfer-backend", "nixl")
NIXL = {
    f"full-nixl-{how}": replace(
        USUAL["page1"],
        page_size=page,
        flags={"prefill": (*_BY_NIXL, "--pdd-wan-transport", how), "relay": _BY_NIXL, "main": _BY_NIXL},
    )
    for how, page in (("engine", 16), ("stream", 1))
}
PAGE64 = {"full-page64": replace(USUAL["page1"], page_size=64)}
MANY = {
    "many": Cluster(kind="pdd", prefills=2, relays=2, page_size=16, wan_rate_limit=RATE),
    "full-mains": Cluster(kind="pdd", mains=2, page_size=16, wan_rate_limit=RATE),
}
CLUSTERS = {
    **{**USUAL, **FAULTS, **SEAM, **NUMERICS, **TIGHT, **HETERO, **MANY},
    **{**_product(), **PAGE64, **NIXL, **FULL_SEAM},
}
WITH_NIXL = tuple(NIXL)
DEFAULT = tuple(USUAL)
# For tests that meet the layout at every step.
LAYOUTS = WITH_BREAKS = (*USUAL, *_product(), *PAGE64, *NIXL)
# For tests to which the layout matters little, and for those to which only the number of ranks does.
ONE = ("page1", "full:page16", "full:tp2")
FULL_LAYOUTS = (*_product(), *PAGE64, *NIXL)
RANKS_OF_ALL = ("page1", "full:page16", "tp2", *FULL_LAYOUTS)
