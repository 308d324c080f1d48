"""What a tenant may see of itself, and an operator of all: limits, what is left of them, what was used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from deployments.access.callers import CallerOf, OperatorOf

if TYPE_CHECKING:
    from deployments.openapi.answers import TenantList, TenantObject
    from deployments.service import GenerationService
    from turnout.access_config import TenantLimits


def router(service: GenerationService) -> APIRouter:
    """`/v1/tenant` for everybody, `/v1/tenants` for operators."""
    routes = APIRouter()

    @routes.get("/v1/tenant")
    async def of_caller(caller: CallerOf) -> Response:
        return JSONResponse(_tenant(service, caller.tenant, caller.limits))

    @routes.get("/v1/tenants")
    async def of_all(caller: OperatorOf) -> Response:
        known = service.callers.all_limits() or {caller.tenant: caller.limits}
        data = [_tenant(service, name, limits) for name, limits in sorted(known.items())]
        listed: TenantList = {"object": "list", "data": data, "faults": service.callers.faults}
        return JSONResponse(listed)

    return routes


def _tenant(service: GenerationService, name: str, limits: TenantLimits) -> TenantObject:
    return {
        "tenant": name,
        "limits": limits.model_dump(mode="json"),
        "left": service.admission.left(name, limits),
        "usage": service.admission.used(name),
    }
