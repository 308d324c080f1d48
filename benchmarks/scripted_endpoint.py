"""An OpenAI-compatible server that computes nothing: it streams the same tokens at a fixed pace to every client.

python -m benchmarks.scripted_endpoint PORT MOST_TOKENS PACE_S
"""

from __future__ import annotations

import asyncio
import json
import sys

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _event(**values: object) -> bytes:
    return _chunk(b"data: " + json.dumps(values).encode() + b"\n\n")


def _choice(delta: dict[str, str], reason: str | None = None) -> bytes:
    return _event(id="c", choices=[{"index": 0, "delta": delta, "finish_reason": reason}])


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int, pace_s: float) -> None:
    """Answer the requests of one connection; of what they ask only `max_tokens` is looked at."""
    loop = asyncio.get_running_loop()
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            asked = json.loads(await reader.readexactly(int(length.split(b":")[1])))
            tokens = min(most, asked.get("max_tokens") or asked["max_completion_tokens"])
            usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": tokens + 8}
            writer.write(HEAD)
            began = loop.time()
            for number in range(tokens):
                if (left_s := began + number * pace_s - loop.time()) > 0:
                    await asyncio.sleep(left_s)
                writer.write(_choice({"content": "word "}))
                await writer.drain()
            writer.write(
                _choice({}, "stop") + _event(choices=[], usage=usage) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            )
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _serve(port: int, most: int, pace_s: float) -> None:
    server = await asyncio.start_server(lambda reader, writer: _answer(reader, writer, most, pace_s), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
