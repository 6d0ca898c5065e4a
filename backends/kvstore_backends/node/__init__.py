"""`node://`: the memory and disks of many nodes as one pool.

    node://10.0.0.1:7070,10.0.0.2:7070?replicas=2        these nodes
    node://kv.default.svc:7070?discover=dns              all addresses of a name (a Kubernetes headless service)
    node:///etc/kvstore/nodes?discover=file              the nodes that a file names; it is watched
    node:///run/kvstore/node.sock                        a node of this host, by its Unix socket: shared memory
    kvstore+ucx://10.0.0.1:7070                          node:// with transport=ucx

Where a record is follows from its key and the names and weights of the nodes (`kvstore.placement`), so all clients must
know the same ones. A new node takes its share of the keys and no others move.

**Reading.** One request per node and batch. With replicas, of the nodes that are up the one that is least loaded by
what was measured; when it takes unusually long the next one is asked as well, and when it lacks the record, or fails,
too. **Writing.** The first of a key's nodes that answers decides whether a record is new (else: EXISTS, and nothing is
sent to the others); then the others get it, all at once, from the same buffer. It is OK when `write_quorum` nodes have
it. What a node lacks and another has is given to it in the background, when a read or write notices (`read_repair`).

**A node that is down** is noticed after three failed calls, and from then on refused in microseconds, until a ping
(every half to five seconds) finds it back. Without replicas its share of the keys are misses, as long as other nodes
answer, and puts of them fail; with replicas the others serve. If no node is up, calls fail. None of that lets a breaker
around the pool open because of one node.

**A node that hangs**, until it is found to be down, costs its share of a call and nothing more: nodes have a little
less time than their caller (`margin`), so that what the others answered is back with him before his deadline. With
replicas it gets no further reads while one of its calls does not end.

**Nodes come and go** under load (`discover`): calls under way end where they began. For `rebalance_grace` a miss is
looked for at the nodes that had the key before the last change, and what is found moves to where it belongs. What a
node holds that it should not any more is neither found nor listed, and goes by eviction.

After `os.fork()` a pool that was opened before raises `ClosedError` in the child; open another one there.
"""

from .backend import NodeBackend
from .client import NodeClient

__all__ = ["NodeBackend", "NodeClient"]
