#!/usr/bin/env bash
# Main decode, datacenter B: GPUs with memory bandwidth. Datacenter A must reach ports 9310 (PDD), 9320 and
# the next --tp - 1 ports (KV streams) and the ports of the transfer engine; the router must reach port 30000.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-32B}
ADDRESS=${ADDRESS:?the address of this machine as datacenter A reaches it, e.g. 10.2.0.11}
PREFILLS=${PREFILLS:?bootstrap addresses of all prefills, e.g. 10.1.0.11:8998,10.1.0.21:8998}
KEYS=${KEYS:-/etc/sglang-pdd/keys}

# The same in all roles, since one engine serves both of prefill's destinations: tcp, or rdma where RoCE reaches B.
export MOONCAKE_PROTOCOL=${MOONCAKE_PROTOCOL:-tcp}

exec python -m sglang.launch_server \
    --model-path "$MODEL" --tp "${TP:-4}" --page-size 64 \
    --host "$ADDRESS" --port 30000 \
    --disaggregation-transfer-backend mooncake \
    --pdd-role main \
    --pdd-host 0.0.0.0 --pdd-port 9310 --pdd-advertise "$ADDRESS" \
    --pdd-wan-port 9320 \
    --pdd-prefills "$PREFILLS" \
    --pdd-keys "$KEYS" \
    "$@"
