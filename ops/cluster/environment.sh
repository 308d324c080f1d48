# What every process of a cluster has in its environment. Ray reads these when a node starts, so every start command
# reads this file first: `. ~/turnout/ops/cluster/environment.sh; ray start ...`. On one machine `turnout serve` sets
# the same by itself.
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"

# Only holders of ~/.ray/auth_token (or RAY_AUTH_TOKEN) can give this cluster code to run. Said on every node: what Ray
# does when it is unset depends on files in the home folder.
export RAY_AUTH_MODE=token
export RAY_USAGE_STATS_ENABLED=0

# Replica to replica over gRPC halves the time per streamed item.
export RAY_SERVE_USE_GRPC_BY_DEFAULT=1
export RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH=67108864
# What a proxy takes over gRPC before anybody looks at a key.
export RAY_SERVE_GRPC_MAX_MESSAGE_SIZE=41943040
# Ray runs workers at niceness 15; serving is no background work.
export RAY_worker_niceness=0
export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0

# A proxy that hangs is replaced after seconds, not after half a minute.
export RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S=1
export RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S=5

# Nodes wait this long for a head that is started again (ops/runbooks/cluster.md) before they end themselves.
export RAY_gcs_rpc_server_reconnect_timeout_s=600
