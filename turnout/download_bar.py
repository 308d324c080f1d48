"""The progress bar of downloads."""

from __future__ import annotations

from typing import Any

from huggingface_hub.utils.tqdm import tqdm


class DownloadBar(tqdm):
    """Progress bar that shows on a terminal only; HF_HUB_DISABLE_PROGRESS_BARS hides it there as well."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"disable": None, **options})  # type: ignore[no-untyped-call]
