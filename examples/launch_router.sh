#!/usr/bin/env bash
# An ordinary router in front, anywhere. It knows prefill and main decode as a plain prefill/decode pair; the relay is
# invisible to it. Start it last.
set -euo pipefail

PREFILL=${PREFILL:?URL of prefill, e.g. http://10.1.0.11:30000}
MAIN=${MAIN:?URL of main decode, e.g. http://10.2.0.11:30000}

exec python -m sglang_router.launch_router \
    --pd-disaggregation \
    --prefill "$PREFILL" 8998 \
    --decode "$MAIN" \
    --policy cache_aware \
    --host 0.0.0.0 --port 8000 \
    "$@"
