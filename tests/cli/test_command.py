from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

COMMANDS = [
    "serve", "generate", "batch", "task", "methods", "parts", "status", "profile", "calibrate", "models", "config",
    "train", "bench", "route", "cache", "experiment", "tenants",
]  # fmt: skip
SUBCOMMANDS = [
    "config check", "config schema", "bench speculation", "route explain", "route show", "train outcomes",
    "train router", "train judge", "train reward_model", "train enough", "train disco", "train specdecpp",
    "train medusa", "train redrafter", "train kangaroo", "train eesd", "train kv-codecs", "train autodeco",
    "cache stats", "cache flush", "cache pin", "cache register-public", "experiment run", "experiment resume",
    "experiment list", "experiment show", "experiment rm", "experiment compare", "experiment live", "experiment tune",
    "tenants add", "tenants list", "tenants show", "tenants set", "tenants rotate", "tenants revoke",
    "tenants remove", "tenants usage", "models pull",
]  # fmt: skip


def test_help_names_every_command(run: Any) -> None:
    result = run("--help")
    assert result.code == 0
    assert [line.split()[0] for line in result.out.partition("Commands:\n")[2].splitlines()] == COMMANDS


@pytest.mark.parametrize("command", [*COMMANDS, *SUBCOMMANDS])
def test_every_command_explains_itself(run: Any, command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.code == 0
    assert f"turnout {command}" in result.out
    assert result.out.count("\n") > 5


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), ([], 2), (["no-such-command"], 2)])
def test_exit_codes_of_the_bare_command(run: Any, arguments: list[str], code: int) -> None:
    assert run(*arguments).code == code


def test_help_loads_nothing_heavy() -> None:
    script = """
        import sys
        sys.argv = ["turnout", "--help"]
        from cli.main import main
        try:
            main()
        except SystemExit:
            pass
        print(sorted({"torch", "ray", "grpc", "transformers", "numpy", "rich"} & set(sys.modules)))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "[]"


SERVE = """
    import signal
    import sys
    import threading
    from types import SimpleNamespace
    import deployments.app
    from cli.main import main

    def start(config, tell):
        print("starting", *config.pools, flush=True)
        ending = lambda: print("ending", flush=True)
        noted = [SimpleNamespace(notes=("slower than it could be",)) for _ in range(2)]
        where = {"grpc_address": "127.0.0.1:9", "http_url": "http://127.0.0.1:8"}
        return SimpleNamespace(**where, store=None, stop=ending, stats=lambda: {"p": noted})

    def take_a_signal():
        if sys.stdin.readline():
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    deployments.app.start = start
    sys.argv = ["turnout", "serve", sys.argv[1]]
    threading.Thread(target=take_a_signal, daemon=True).start()
    main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, None])
def test_serve_says_where_it_listens_and_stops_cleanly(config_file: Path, number: signal.Signals | None) -> None:
    """Also where the kernel gives the signal to another thread than the main one."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVE), str(config_file)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        lines = [server.stdout.readline().strip() for _ in range(5)]
        if number is not None:
            server.send_signal(number)
        rest, errors = server.communicate(None if number else "signal\n")
    assert lines[:4] == ["starting p", "serving p; Ctrl-C stops", "gRPC  127.0.0.1:9", "HTTP  http://127.0.0.1:8/v1"]
    assert lines[4] == "note  p: slower than it could be"  # once, whatever the number of replicas
    assert (rest, errors, server.returncode) == ("ending\nstopped\n", "", 0)


def test_serve_refuses_a_bad_configuration_before_it_starts_anything(run: Any, tmp_path: Path) -> None:
    result = run("serve", str(tmp_path / "absent.yaml"))
    assert result == (1, "", f"turnout: config: cannot read {tmp_path / 'absent.yaml'}: No such file or directory\n")
