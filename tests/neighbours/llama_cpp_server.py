"""llama.cpp's own server, over HTTP; run by an interpreter that has xllamacpp: FILE.gguf PORT NAME SLOTS."""

from __future__ import annotations

import signal
import sys

import xllamacpp

SLOT_TOKENS = 1024  # prompt and answer

if __name__ == "__main__":
    path, port, name, slots = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = path, {name}
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.n_parallel, params.n_ctx, params.fit_params = int(slots), int(slots) * SLOT_TOKENS, False
    params.endpoint_metrics = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    signal.pause()
