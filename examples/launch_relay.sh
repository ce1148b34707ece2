#!/usr/bin/env bash
# Relay decode, datacenter A: a small instance beside prefill, on the same fast network. It needs no open port to B;
# it dials prefill, and the PDD port of main decode. Model and --page-size are the same in all roles.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-32B}
ADDRESS=${ADDRESS:?the address of this machine on the network it shares with prefill, e.g. 10.1.0.12}
PREFILLS=${PREFILLS:?bootstrap addresses of all prefills, e.g. 10.1.0.11:8998,10.1.0.21:8998}
KEYS=${KEYS:-/etc/sglang-pdd/keys}

# The same in all roles, since one engine serves both of prefill's destinations: tcp, or rdma where RoCE reaches B.
export MOONCAKE_PROTOCOL=${MOONCAKE_PROTOCOL:-tcp}

exec python -m sglang.launch_server \
    --model-path "$MODEL" --tp "${TP:-4}" --page-size 64 \
    --host "$ADDRESS" --port 30000 \
    --disaggregation-transfer-backend mooncake \
    --pdd-role relay \
    --pdd-prefills "$PREFILLS" \
    --pdd-keys "$KEYS" \
    --pdd-max-relays "${MAX_RELAYS:-16}" \
    "$@"
