"""Requests that leave something to be kept, counted in their tenants' limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from deployments.access.callers import Caller

if TYPE_CHECKING:
    from deployments.service import GenerationService


@asynccontextmanager
async def counted(service: GenerationService, caller: Caller) -> AsyncIterator[None]:
    """What is to be kept for a tenant is a request of it, and one in progress while its body comes.

    Looking at what is kept counts as none: who waits for a batch does so again and again.

    Raises:
        TurnoutError: RESOURCE_EXHAUSTED, UNAVAILABLE, ...: the tenant may not ask now.
    """
    await service.precheck(caller)
    service.admission.count(caller)
    with service.admission.reading(caller):
        yield
