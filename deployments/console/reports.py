"""Experiment reports in a folder: JSON files with a list of points, quality against cost."""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from turnout.errors import Code, TurnoutError, not_found

NAME = re.compile(r"[\w][\w.%-]{0,99}")  # % as `turnout.file_names` escapes slashes
MAX_BYTES = 64 << 20
MAX_REPORTS = 500


class Point(BaseModel):
    """One arm of an experiment; `cost` is relative to the large model alone, the interval is the quality's."""

    model_config = ConfigDict(frozen=True)

    label: str
    method: str = ""
    dataset: str = ""
    quality: FiniteFloat
    quality_low: FiniteFloat | None = None
    quality_high: FiniteFloat | None = None
    cost: FiniteFloat = Field(ge=0)


class Report(BaseModel):
    """What the page needs of a report; whatever else it holds is left out."""

    model_config = ConfigDict(frozen=True)

    title: str = ""
    points: tuple[Point, ...]


class Reports:
    """The reports of one folder, read when they are asked for.

    Args:
        folder: may be missing: then there are none yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def listed(self) -> list[dict[str, Any]]:
        """Names and times of change (seconds since 1970), the newest first."""
        found = []
        for path in self._folder.glob("*.json"):
            # One may be removed while the others are looked at, and one that may not be read hides none of them.
            with suppress(OSError):
                status = path.stat()
                if NAME.fullmatch(path.stem) and S_ISREG(status.st_mode):
                    found.append((-status.st_mtime, path.stem))
        found.sort()
        return [{"name": name, "modified": -changed} for changed, name in found[:MAX_REPORTS]]

    def read(self, name: str) -> dict[str, Any]:
        """One report.

        Raises:
            TurnoutError: NOT_FOUND; INTERNAL where the file is no report.
        """
        path = self._folder / f"{name}.json"
        try:
            if not NAME.fullmatch(name) or not S_ISREG((status := path.stat()).st_mode):
                raise self._missing(name)
            if status.st_size > MAX_BYTES:
                raise _broken(name, f"is larger than {MAX_BYTES} bytes")
            report = Report.model_validate_json(path.read_bytes().removeprefix(codecs.BOM_UTF8))
        except (FileNotFoundError, NotADirectoryError):
            raise self._missing(name) from None
        except OSError as error:
            raise _broken(name, error.strerror or "cannot be read") from None
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, fault["loc"]))
            raise _broken(name, f"{where}: {fault['msg']}" if where else fault["msg"]) from None
        return {"name": name, **report.model_dump()}

    def _missing(self, name: str) -> TurnoutError:
        return not_found("name", name[:100], sorted(each["name"] for each in self.listed()))


def _broken(name: str, why: str) -> TurnoutError:
    return TurnoutError(Code.INTERNAL, f"the report {name!r} cannot be shown: {why}")
