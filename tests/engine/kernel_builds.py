"""The compiled kernels in every width that this processor can run."""

from __future__ import annotations

from typing import Any

import pytest

from engine.backends.native import library as native

# Where there is AVX-512, the kernels are also tried as they are compiled without.
WIDTHS = [(), ("-mno-avx512f",)] if "avx512f" in native._processor_flags() else [()]


@pytest.fixture(scope="module", autouse=True, params=WIDTHS, ids=lambda flags: "".join(flags) or "widest")
def every_build(request: pytest.FixtureRequest) -> Any:
    """Run the tests of a module that imports this once for each width."""

    def forget() -> None:
        native._find.cache_clear()
        native.panel_columns.cache_clear()

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "FLAGS", (*native.FLAGS, *request.param))
        yield
    forget()
