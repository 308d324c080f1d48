"""The models of a pool with endpoints, as routing policies and their training see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from decoding.model import Model, ModelPool
from pool.endpoints.text_model import EndpointModel, TextModel
from turnout.cost import Price
from turnout.errors import invalid


@dataclass(slots=True)
class RoutedModels(ModelPool):
    """Models that are computed here; of the others only what they are called and what they cost.

    Attributes:
        elsewhere: what each endpoint's requests call its model, by the model's name here.
        costs: of a token, by the model's name; empty where they are not known of all models in one unit.
    """

    elsewhere: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)

    def by_role(self, role: str) -> Model:
        """See `ModelPool.by_role`."""
        if (name := self.roles.get(role)) in self.elsewhere:
            raise invalid(
                "routing", f"this policy needs the tokens of its models, and {name!r} ({role}) is an endpoint"
            )
        return ModelPool.by_role(self, role)

    def digest_of(self, role: str) -> str:
        """See `ModelPool.digest_of`; an endpoint's model is known by the name that requests call it by."""
        name = self.elsewhere.get(self.roles.get(role, ""))
        return ModelPool.digest_of(self, role) if name is None else f"endpoint:{name}"

    def token_cost(self, role: str) -> float:
        """See `ModelPool.token_cost`.

        Raises:
            TurnoutError: INVALID_ARGUMENT: it is not known of all models.
        """
        if role not in self.roles:
            self.by_role(role)
        if not self.costs:
            message = "what answers cost is not known: set endpoint.num_parameters of all endpoints, or price of all"
            raise invalid("models", f"{message} models of the pool")
        return self.costs[self.roles[role]]


def endpoint_names(models: Mapping[str, TextModel]) -> dict[str, str]:
    """Return what each endpoint's requests call its model, by the model's name here."""
    return {name: each.client.config.model for name, each in models.items() if isinstance(each, EndpointModel)}


def token_costs(models: Mapping[str, TextModel], prices: Mapping[str, Price]) -> dict[str, float]:
    """Return what a written token of each model costs: in parameters, or else in dollars; empty: not known of all."""
    sizes = {name: float(model.num_parameters) for name, model in models.items()}
    if all(sizes.values()):
        return sizes
    dollars = {name: prices[name].of(0.0, 0.0, 1.0) for name in models if name in prices}
    return dollars if len(dollars) == len(models) and all(dollars.values()) else {}
