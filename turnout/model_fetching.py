"""From a model's path to its files on this machine: found without any network, or fetched."""

from __future__ import annotations

from pathlib import Path

from turnout.model_files import Found
from turnout.model_location import HubRepository, LocalFiles, StoredFiles, parse_location

# What this process fetched, by path and whether with weights: it keeps to one version of what may change elsewhere.
_fetched: dict[tuple[str, bool], Path] = {}
_commits: dict[HubRepository, str] = {}


def fetch_model(text: str, field: str = "model", weights: bool = True) -> Path:
    """Get a model's files to this machine, unless they are here.

    Within a process, a path leads to the same files from its first use on.

    Args:
        text: the path, see `model_location.parse_location`.
        field: its place in the configuration, for messages.
        weights: whether weights are needed, and not the description and the tokenizer only.

    Returns:
        Folder of a checkpoint, or a GGUF file; one of this machine may be missing.

    Raises:
        TurnoutError: see `parse_location`, `hub_models.fetch` and `stored_models.fetch`.
    """
    location = parse_location(text, field)
    if isinstance(location, LocalFiles):
        return location.path
    for key in ((text, True), (text, weights)):
        if key in _fetched:
            return _fetched[key]
    if isinstance(location, HubRepository):
        from turnout import hub_models

        path = hub_models.fetch(location, _commit(location, field), field, weights)
    else:
        from turnout import stored_models

        path = stored_models.fetch(location, field, weights)
    _fetched[text, weights] = path
    return path


def find_model(text: str, field: str = "model", weights: bool = True) -> Found:
    """Look for a model's files on this machine; nothing is asked of others.

    Args:
        text: as of `fetch_model`, as are
        field: and
        weights: here.

    Returns:
        Where they are. A local path is returned as it is.

    Raises:
        TurnoutError: see `parse_location`.
    """
    location = parse_location(text, field)
    if isinstance(location, LocalFiles):
        return Found(location.path)
    if isinstance(location, StoredFiles):
        from turnout import stored_models

        return stored_models.find(location, weights)
    from turnout import hub_models

    return hub_models.find(location, weights)


def pin_model(text: str, field: str = "model") -> str:
    """Replace the revision of a hub's repository by the commit that it is now; other paths stay as they are.

    Raises:
        TurnoutError: see `parse_location` and `hub_models.resolve`.
    """
    location = parse_location(text, field)
    return str(location.at(_commit(location, field))) if isinstance(location, HubRepository) else text


def revision_of(text: str, field: str = "model") -> str:
    """Name the commit of a hub's repository that this process uses; empty for other paths.

    Raises:
        TurnoutError: as `pin_model`.
    """
    location = parse_location(text, field)
    return _commit(location, field) if isinstance(location, HubRepository) else ""


def _commit(repository: HubRepository, field: str) -> str:
    if repository.is_pinned:
        assert repository.revision is not None
        return repository.revision
    if repository not in _commits:
        from turnout import hub_models

        _commits[repository] = hub_models.resolve(repository, field)
    return _commits[repository]
