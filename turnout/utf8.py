"""UTF-8 that arrives in parts: complete characters, and the bytes that still wait for theirs."""

from __future__ import annotations

import codecs


def split_complete(data: bytes | bytearray) -> tuple[str, bytes]:
    """Decode the complete characters of a text whose end may still be missing.

    Args:
        data: UTF-8, from the start of a character.

    Returns:
        Its text, with U+FFFD in place of what can be no character any more, and the at most three last bytes that may
        still become one.
    """
    text, consumed = codecs.utf_8_decode(data, "replace", False)
    return text, bytes(data[consumed:])


def name_of_part(text: str, data: bytes | None) -> str:
    r"""Name a token for a person.

    Args:
        text: that it completes.
        data: its bytes, where the text is not all that it holds.

    Returns:
        The text, or where that shows nothing of a part of a character, its bytes as OpenAI's API writes them:
        `bytes:\xe6\x97`.
    """
    if not data or text.strip("\ufffd"):
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
