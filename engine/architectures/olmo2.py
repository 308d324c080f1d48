"""OLMo 2: norms after attention and MLP in place of before them, and over all heads of queries and keys at once."""

from engine.architectures.base import POST_NORMS, Architecture

ARCHITECTURE = Architecture(title="OLMo 2", halves=POST_NORMS, splits=False, has_queries=False, tiny={"": {}})
