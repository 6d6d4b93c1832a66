"""What the tests of quotas share: a driver of one tenant with a quota, its requests and its refusals."""

from __future__ import annotations

import dataclasses

import pytest
from scheduler_driver import SMALL, Driver, tokens

from tinyloop_service.errors import (
    TenantQuotaExceeded,
)
from tinyloop_service.types import GenerationRequest, Quota


def driver_of(quota: Quota, tenant: str = "a", **limits: int) -> Driver:
    driver = Driver(dataclasses.replace(SMALL, **limits))
    driver.core.set_quotas({tenant: quota}, driver.now_ns)
    return driver


def ask(
    tenant: str = "a", prompt: int = 2, max_tokens: int = 8, prefix: str | None = None, n: int = 1
) -> GenerationRequest:
    return GenerationRequest(tokens(prompt, 3), max_tokens, tenant, prefix, n=n)


def refusal(call: object) -> TenantQuotaExceeded:
    with pytest.raises(TenantQuotaExceeded) as caught:
        call()  # type: ignore[operator]
    return caught.value


def running(driver: Driver, *orders: int) -> list[bool]:
    """Which of the requests have been admitted."""
    return [driver.requests[order].admitted is not None for order in orders]
