"""`python -m engine.backends.native`: compile the kernels now and say whether they can be used here."""

from __future__ import annotations

import logging
import sys

from engine.backends.native.library import NativeUnavailableError, library
from turnout.standard_streams import replace_unencodable

if __name__ == "__main__":
    replace_unencodable()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        library()
    except NativeUnavailableError as error:
        sys.stdout.write(f"no compiled CPU kernels, decoding will be slower: {error}\n")
    else:
        sys.stdout.write("the CPU kernels are compiled\n")
