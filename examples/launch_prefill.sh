#!/usr/bin/env bash
# Prefill, datacenter A: compute-rich GPUs, a fast network to the relay, Ethernet to datacenter B.
# Datacenter B must reach ports 8998 (bootstrap), 9310 (PDD) and 30000 (what is fetched again after a failure) of this
# machine and those of the transfer engine; the router must reach port 30000.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-32B}
ADDRESS=${ADDRESS:?the address of this machine as datacenter B reaches it, e.g. 10.1.0.11}
KEYS=${KEYS:-/etc/sglang-pdd/keys} # this machine's folder of `sglang-pdd keys`
WAN=${WAN:-9gbit}                  # about 90 % of what the link gives: token ids stay fast beside KV

# The same in all roles, since one engine serves both of prefill's destinations: tcp, or rdma where RoCE reaches B.
export MOONCAKE_PROTOCOL=${MOONCAKE_PROTOCOL:-tcp}

exec python -m sglang.launch_server \
    --model-path "$MODEL" --tp "${TP:-4}" --page-size 64 \
    --host 0.0.0.0 --port 30000 \
    --disaggregation-transfer-backend mooncake \
    --disaggregation-bootstrap-port 8998 \
    --pdd-role prefill \
    --pdd-host 0.0.0.0 --pdd-port 9310 --pdd-advertise "$ADDRESS" \
    --pdd-keys "$KEYS" \
    --pdd-relay-policy auto --pdd-relay-threshold-ms 200 \
    --pdd-wan-rate-limit "$WAN" \
    "$@"
