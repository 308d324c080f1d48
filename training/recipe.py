"""How each demo model is built and trained: one frozen record per model, every number in one place."""

from dataclasses import dataclass

from training.tokenizer import MAX_POSITIONS, VOCABULARY_SIZE


@dataclass(frozen=True)
class Recipe:
    """Shape, schedule and batch of one model.

    Learning rate: warm-up, stable, straight line to zero; then, where `finish_steps` is not 0, a second
    line to zero from `finish_peak` of the peak over the last steps.
    """

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    total_steps: int
    decay_steps: int
    warmup_steps: int = 50
    finish_steps: int = 0
    finish_peak: float = 0.5
    curriculum_steps: int = 400
    num_rows: int = 32
    row_len: int = 256
    muon_lr: float = 0.02
    adamw_lr: float = 0.004
    weight_decay: float = 0.01
    seed: int = 20
    autocast: bool = True
    vocabulary_size: int = VOCABULARY_SIZE
    max_positions: int = MAX_POSITIONS

    def __post_init__(self) -> None:
        if not 0 < self.warmup_steps + self.decay_steps + self.finish_steps <= self.total_steps:
            raise ValueError("warmup_steps + decay_steps + finish_steps must be between 1 and total_steps")

    def lr_scale(self, step: int) -> float:
        """Factor on the peak learning rates at a step counted from 0."""
        first_end = self.total_steps - self.finish_steps
        if step >= first_end:
            return self.finish_peak * (self.total_steps - step) / self.finish_steps
        warming = min(1.0, (step + 1) / max(1, self.warmup_steps))
        left = (first_end - step) / max(1, self.decay_steps)
        return min(warming, 1.0, left)


RECIPES: dict[str, Recipe] = {
    "large": Recipe(
        name="large",
        hidden_size=256,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        intermediate_size=704,
        total_steps=940,
        decay_steps=200,
        finish_steps=180,
    ),
    "small": Recipe(
        name="small",
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=384,
        total_steps=630,
        decay_steps=75,
        curriculum_steps=200,
    ),
}
