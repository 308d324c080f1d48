"""OLMo 3: OLMo 2 with windows in most layers, whose rotary embedding is not scaled as the others' is."""

from engine.architectures.base import POST_NORMS, TINY_WINDOW, Architecture

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}

ARCHITECTURE = Architecture(
    title="OLMo 3",
    halves=POST_NORMS,
    splits=False,
    has_queries=False,
    tiny={
        "": {
            "sliding_window": TINY_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": YARN,
        }
    },
)
