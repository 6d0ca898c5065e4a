"""The control API: what a node lets be seen and done, a controller that several nodes report to, routing, the client.

`Client` speaks to either. `Instance` and `Journal` are the seam to the node, `Reporter` tells a controller of one. The
servers (`app`, `controller`, `server`) need FastAPI (`pip install 'kvstore[control]'`) and are imported where they are
used; nothing here does. See docs/control.md.
"""

from .access import DeniedError
from .client import Client
from .instance import Health, Instance, InstanceInfo, Job, SnapshotPage, TierUsage, UnknownError
from .journal import Event, Events, Journal
from .reporter import Reporter
from .settings import ControlSettings

__all__ = [
    "Client",
    "ControlSettings",
    "DeniedError",
    "Event",
    "Events",
    "Health",
    "Instance",
    "InstanceInfo",
    "Job",
    "Journal",
    "Reporter",
    "SnapshotPage",
    "TierUsage",
    "UnknownError",
]
