"""Durable names: what outlives a process, and how replicas agree on it.

    rpc ──► Names ─────────────► Scheduler ──► core, engine        this process: states, pages, running requests
              │  reads, claims      ▲
              ▼                     │ adopt, forget: what the registry says, as plain values
           Registry ── changes ─────┘
           memory │ sqlite │ redis                                 all processes: definitions, never K/V

A registry holds one record a name: tenant, name, uid, revision (the etag), the tokens with those of all ancestors,
loops, window, pin, times.  Names of another model or cache mode are another *realm*: they are neither seen nor lost.

- **Acknowledged is durable.**  A create, update or delete compares and sets its record first, then changes the core,
  then answers.  So what was answered survives a kill, and what failed on the way left a whole record or none.
- **Looked up on first use, built once.**  A name that the core does not know is read and *adopted* as EVICTED; from
  there it goes the way of every evicted prefix: the next use builds it, once for all who wait.  An adopted record
  brings its ancestors with it by uid, so children that share a parent share its pages again.
- **At most 1 s old.**  Where replicas share a registry each follows its changes: pub/sub for speed, a poll four times a
  second for certainty.  A use that finds the last look older than `MAX_AGE_S` waits for the next one.  Another uid, or
  none, ends the local name and drops its pages; running requests finish on them.
- **The registry is down.**  Names in memory go on serving, changes and unknown names get REGISTRY_UNAVAILABLE.
- **Expiry** is by the time in the record, on each replica's own clock.  **Eviction** and FAILED are local: another
  replica, or the same one started again, builds from the record.  A **pin** is kept where the local budget allows it.
- **One name at a time.**  In a process whatever reads and changes one name's record does so alone; between processes
  compare-and-set decides, and who loses looks again.

The scheduler knows none of this: no import leads from there to here.
"""

from tinyloop_service.registry.api import Changes, Realm, Registry
from tinyloop_service.registry.opening import open_registry

__all__ = ["Changes", "Realm", "Registry", "open_registry"]
