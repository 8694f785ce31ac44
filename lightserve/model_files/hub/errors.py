"""What a failed request to the hub means for the operator, in one line with the remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightserve.errors import ModelFilesError
from lightserve.model_files.hub.name import HubName
from lightserve.model_files.hub.settings import HubSettings


def http_error() -> type[Exception]:
    """The base of all errors of the HTTP library, which depends on the version of huggingface_hub."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return HTTPError


@contextmanager
def one_line_errors(name: HubName, settings: HubSettings) -> Iterator[None]:
    """The line has the cause. A traceback of the HTTP library before it helps nobody."""
    try:
        yield
    except (http_error(), OSError, ValueError) as error:  # a ValueError: an answer that is not JSON
        raise ModelFilesError(f"{name}: {describe(error, name, settings)}") from None


def describe(error: Exception, name: HubName, settings: HubSettings) -> str:
    from huggingface_hub.errors import FileMetadataError, HfHubHTTPError

    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError) and _is_wrapper(error):
        error = error.__cause__  # type: ignore[assignment]
    if isinstance(error, HfHubHTTPError):
        return _http_problem(error, name, settings)
    if isinstance(error, (http_error(), ConnectionError)):
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return (
            f"no folder {Path(str(name)).absolute()}, and {settings.endpoint} cannot be reached ({reason}); check the "
            "network, HTTPS_PROXY and HF_ENDPOINT, or "
            f"run `hf download {name.repo}` on another machine and copy its cache to {settings.cache}"
        )
    if isinstance(error, FileMetadataError | ValueError):
        return f"{settings.endpoint} gave an answer that is not the hub's ({error}); check HF_ENDPOINT and HTTPS_PROXY"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no space left in {settings.cache}; free some, or set HF_HOME to a folder on another disk"
    return f"{settings.cache} cannot be written ({error}); fix that or set HF_HOME to another folder"


def _is_wrapper(error: Exception) -> bool:
    """huggingface_hub reports a failed HEAD request as a file that is missing in the cache."""
    return isinstance(error, FileNotFoundError)


def _http_problem(error: Exception, name: HubName, settings: HubSettings) -> str:
    from huggingface_hub import errors, get_token

    page = f"{settings.endpoint}/{name.repo}"
    status = error.response.status_code  # type: ignore[attr-defined]
    if isinstance(error, errors.GatedRepoError):
        return (
            f"access is restricted ({status}); accept the conditions on {page}, then set HF_TOKEN to a token of that "
            "account or run `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {name.revision!r} ({status}); {page}/tree/main lists branches and tags"
    if isinstance(error, errors.EntryNotFoundError):
        return f"a file is missing on the hub ({status} for {error.response.url}); try again"  # type: ignore[attr-defined]
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404 or (status == 401 and not get_token()):
        return (
            f"no folder {Path(str(name)).absolute()}, and {settings.endpoint} has no such model ({status}); check the "
            "name; for a private model set HF_TOKEN or run `hf auth login`"
        )
    if status in (401, 403):
        return f"{settings.endpoint} refuses the token ({status}); set HF_TOKEN to a valid one with access to {page}"
    if status == 429:
        return f"{settings.endpoint} limits the rate of requests (429); wait some minutes, or set HF_TOKEN"
    return f"{settings.endpoint} answered {status}; try again later"
