"""KV over the WAN: a few persistent TCP streams to each peer rank, scheduled, paced, cancellable. No engine, no torch.

```
                      Schedule (no I/O)                              Landings (no I/O)
                       who is next?                            may this be written, what has landed?
                            │                                                  │
blocks ─▶ plan ─▶ frames ─▶ Sender ═══ streams: one thread each, both ends ═══ Receiver ─▶ regions
                            ◀────────── acknowledged when it has landed ───────┘
```
"""
