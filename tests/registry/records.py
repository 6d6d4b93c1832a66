"""Records for tests, and registries to keep them in."""

from __future__ import annotations

from typing import Any

from tinyloop_service.types import Ancestor, PrefixRecord

TENANT = "acme"


def record(name: str = "genesis", *, uid: str = "", revision: int = 1, **changes: Any) -> PrefixRecord:
    fields: dict[str, Any] = {
        "tenant": TENANT,
        "name": name,
        "uid": uid or f"uid-of-{name}",
        "revision": revision,
        "tokens": (1, 2, 50_000),
        "loops": 8,
        "cache_window": 64,
        "ancestors": (Ancestor("uid-of-root", "root", 1), Ancestor("uid-of-parent", "parent", 2)),
        "content_sha256": "ab" * 32,
        "pinned": True,
        "create_time_ns": 1_700_000_000_000_000_001,
        "expire_time_ns": None,
    }
    return PrefixRecord(**(fields | changes))
