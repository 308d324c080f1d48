"""What a benchmark says of the machine it ran on."""

from __future__ import annotations

import pytest

from experiments.machine import describe, vectors


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("fpu avx avx2 fma", "AVX2"),
        ("avx2 avx512f avx512bw", "AVX-512"),
        ("avx2 avx512f avx512_bf16", "AVX-512 BF16"),
        ("avx2 avx512f avx512_bf16 amx_bf16 amx_tile", "AMX"),
        ("fpu sse2 avx", "no AVX2"),
    ],
)
def test_the_widest_that_it_multiplies_with_is_named(flags: str, name: str) -> None:
    assert vectors(flags) == name


def test_it_stands_beside_the_processors_name() -> None:
    assert describe()["processor"].endswith(")")
