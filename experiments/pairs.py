"""Pairs of models that benchmarks run on: the demo's, the real one that `make real` fetches, or a configuration's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments import real_model
from turnout.config import MethodChoice, ModelConfig, PoolConfig, TurnoutConfig, load_config, model_path
from turnout.errors import not_found

DEMO, REAL = "demo", "real"
OPTION = "demo, real (fetched by `make real`, with the draft that is trained for it), or a configuration file"


@dataclass(frozen=True, slots=True)
class Pair:
    """A small and a large model that are served by one pool.

    Attributes:
        name: "demo", "real", or the configuration file.
        title: for the pages.
        pool: name of the pool.
        config: has that pool first.
    """

    name: str
    title: str
    pool: str
    config: TurnoutConfig

    @property
    def members(self) -> tuple[str, str]:
        """Names of the small and of the large model."""
        pool = self.config.pools[self.pool]
        return pool.small, pool.large

    def model(self, role: str) -> ModelConfig:
        """Settings of the small or of the large model."""
        return self.config.models[dict(zip(("small", "large"), self.members, strict=True))[role]]

    def folder(self, role: str) -> Path:
        """Checkpoint of the small or of the large model."""
        return model_path(self.model(role)).resolve()

    def in_dtype(self, dtype: str) -> TurnoutConfig:
        """The configuration with all models in this number format."""
        models = {name: model.model_copy(update={"dtype": dtype}) for name, model in self.config.models.items()}
        return self.config.model_copy(update={"models": models})


def open_pair(name: str) -> Pair:
    """Find a pair by the value of `--pair`.

    Raises:
        TurnoutError: the real models are not there, which names the command that makes them; or the file does not
            exist or is not valid.
    """
    if name == DEMO:
        return Pair(DEMO, "demo pair", DEMO, TurnoutConfig.demo())
    if name == REAL:
        return Pair(REAL, f"{real_model.TITLE} and its draft", REAL, _real())
    if not Path(name).is_file():
        raise not_found("pair", name, [DEMO, REAL, "a configuration file"])
    config = load_config(Path(name))
    return Pair(name, f"the pair of {Path(name).name}", next(iter(config.pools)), config)


def _real() -> TurnoutConfig:
    folders = {"real-small": real_model.draft_folder(), "real-large": real_model.model_folder()}
    models = {
        name: ModelConfig(path=str(folder), kv_memory_bytes=real_model.KV_MEMORY_BYTES)
        for name, folder in folders.items()
    }
    default = MethodChoice(name="speculative")
    pool = PoolConfig(small="real-small", large="real-large", default=default)
    return TurnoutConfig(models=models, pools={REAL: pool})
