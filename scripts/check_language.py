"""Find words that CONTRIBUTING.md bans, in names, docstrings, comments, messages and pages. `make lint` runs it.

    python scripts/check_language.py [--count] [PATH ...]

Python, Markdown, proto, YAML and C++ files are checked; prompts, training data and results are not: see `DATA`. A file
that is not clean yet is listed in pyproject.toml with the number of findings that it may have, which only falls.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = frozenset({".py", ".md", ".proto", ".yaml", ".yml", ".h", ".cpp", ".toml", ".sh"})
# Text that models read or write, generated files, and results as they were written.
DATA = ("training/data/", "turnout/demo/", "turnout/proto/generation_pb2", "docs/results/", "scripts/check_language.py")
# What to write instead.
BANNED = {
    r"beside": "next to, with, compared with",
    r"told": "reported, passed",
    r"nobody": "no client, none, unused",
    r"whoever": "the caller, the client, the process",
    r"whosever": "whose",
    r"in no hurry": "low-priority",
    r"in a hurry": "interactive",
    r"hurried": "interactive",
    r"so many": "a number of, n",
    r"goes on": "continues",
    r"gives? way": "yields, is preempted",
    r"heeds?": "respects",
    r"guilty": "poisoned",
    r"suspects?": "quarantined",
    r"in company": "batched",
    r"company": "other requests",
    r"patient(?:ly)?": "low-priority",
    r"somebody": "a client",
}
# Public names, which do not change: fields, values of parameters and of results, the user of Unix.
NAMES = re.compile(
    r"\bbatch_slowdown_beside\b|\bbeside: Annotated|\bbeside: \d|\b(?:audit|shadow|config|settings)s?\.beside\b"
    r"|`beside`|\bdef beside\(self\) -> int|\"nobody\"|`nobody`|\bNOBODY\b|\"not told apart\"|\bssh_user: nobody\b"
)
WORDS = re.compile(r"(?<![A-Za-z])(" + "|".join(BANNED) + r")(?![A-Za-z])", re.IGNORECASE)


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, word and what to write instead."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for found in WORDS.finditer(NAMES.sub("", line).replace("_", " ")):
            word = found[1].lower()
            better = next(text for pattern, text in BANNED.items() if re.fullmatch(pattern, word))
            yield number, word, better


def files(asked: list[str]) -> list[Path]:
    """Files to check: those asked for, else all that git knows."""
    if asked:
        found = [
            each for name in asked for path in [Path(name)] for each in ([path] if path.is_file() else path.rglob("*"))
        ]
    else:
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        found = [ROOT / name for name in listed if not name.startswith("tests/")]
    return sorted(path.resolve() for path in found if path.suffix in SUFFIXES and not _is_data(path.resolve()))


def _is_data(path: Path) -> bool:
    return not path.is_relative_to(ROOT) or path.relative_to(ROOT).as_posix().startswith(DATA)


def main(arguments: list[str]) -> int:
    """Print findings above what each file may have."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["turnout"]
    allowed, total, failed = settings.get("language", {}), 0, 0
    for path in files([each for each in arguments if not each.startswith("--")]):
        name = path.relative_to(ROOT).as_posix()
        found = list(findings(path))
        total += len(found)
        if "--count" in arguments and found:
            print(f"{len(found):4} {name}")  # noqa: T201
        elif len(found) > allowed.get(name, 0):
            failed += 1
            for number, word, better in found:
                print(f"{name}:{number}: {word!r}; better: {better}")  # noqa: T201
    if "--count" in arguments:
        print(f"{total:4} in all")  # noqa: T201
        return 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
