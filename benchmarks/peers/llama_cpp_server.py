"""The server of llama.cpp, over HTTP; its interpreter has xllamacpp: FILE.gguf PORT NAME SLOTS TOKENS THREADS."""

from __future__ import annotations

import signal
import sys

import xllamacpp

if __name__ == "__main__":
    path, port, name = sys.argv[1:4]
    slots, length, threads = map(int, sys.argv[4:])  # `length`: tokens of a slot, prompt and answer
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = path, {name}
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.n_parallel, params.n_ctx, params.fit_params = slots, slots * length, False
    params.endpoint_metrics = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    signal.pause()
