"""What a pool of nodes counts, besides what its wrappers do."""

from __future__ import annotations

from kvstore.metrics import Metric

__all__ = ["NODE_METRICS"]

_BACKEND = ("backend",)

NODE_METRICS: tuple[Metric, ...] = (
    Metric("kvstore_node_members", "gauge", "Nodes of the pool.", _BACKEND),
    Metric("kvstore_node_down", "gauge", "Nodes that do not answer and are left alone.", _BACKEND),
    Metric("kvstore_node_membership_changes_total", "counter", "Times that nodes came or went.", _BACKEND),
    Metric("kvstore_node_membership_errors_total", "counter",
           "Times that the nodes could not be told (DNS failed, the file is broken); the last answer stays valid.",
           _BACKEND),
    Metric("kvstore_node_unreachable_reads_total", "counter",
           "Reads (items) answered with a miss because all nodes that hold the key are down.", _BACKEND),
    Metric("kvstore_node_former_hits_total", "counter",
           "Reads (items) found at the node that held the key before nodes came or went.", _BACKEND),
    Metric("kvstore_node_underreplicated_puts_total", "counter",
           "Records stored on fewer nodes than `replicas` says; the rest is left to repair.", _BACKEND),
    Metric("kvstore_node_repairs_total", "counter",
           "Records given to a node that lacked them, by result: ok, failed, gone (no source had it), too_large, "
           "dropped (too many were waiting).", ("backend", "result")),
    Metric("kvstore_node_repair_bytes_total", "counter", "Bytes stored by repairs.", _BACKEND),
)  # fmt: skip
