"""One model of the hub, as far as it is in the cache: first its settings, then, if they are needed, its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightserve.errors import ModelFilesError
from lightserve.model_files.folder import find_weight_files
from lightserve.model_files.hub.cache import CachedRepo
from lightserve.model_files.hub.errors import one_line_errors
from lightserve.model_files.hub.listing import Listing, read_listing
from lightserve.model_files.hub.name import HubName
from lightserve.model_files.hub.needed_files import gguf_files, settings_files, weight_files
from lightserve.model_files.hub.settings import HubSettings, read_settings
from lightserve.model_files.hub.transfer import Transfer
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class HubModel:
    name: HubName
    path: Path  # the snapshot's folder, or the .gguf file, the first of several
    settings: HubSettings
    listing: Listing | None  # None: the hub was not asked or did not answer
    problem: str = ""  # why it did not

    def fetch_weights(self) -> None:
        """Download the weights that are missing."""
        if self.path.is_file():
            return
        if self.listing is None:
            self._check_cached_weights()
            return
        with one_line_errors(self.name, self.settings):
            files = weight_files(self.name, self.listing, self.path)
            Transfer(self.name, self.listing.commit, self.settings).run(files)
            CachedRepo(self.settings.cache, self.name.repo).write_ref(self.name.revision, self.listing.commit)

    def _check_cached_weights(self) -> None:
        try:
            find_weight_files(self.path)
        except ModelFilesError as error:
            raise ModelFilesError(f"{self.problem}; the copy in the cache is not complete: {error}") from error


def open_model(name: HubName, trusts_code: bool) -> HubModel:
    """Download config and tokenizer, or the GGUF files. The hub is asked each time, so a branch is up to date.

    If the hub does not answer, the copy in the cache is used.
    """
    settings = read_settings()
    if settings.is_offline:
        return _offline(name, settings)
    try:
        with one_line_errors(name, settings):
            listing = read_listing(name, settings)
    except ModelFilesError as error:
        model = _cached(name, settings, str(error))
        if model is None:
            raise
        logger.warning("%s; using the copy in the cache, %s", error, model.path)
        return model
    return _fetched(name, settings, listing, trusts_code)


def _fetched(name: HubName, settings: HubSettings, listing: Listing, trusts_code: bool) -> HubModel:
    ggufs = gguf_files(name, listing)
    repo = CachedRepo(settings.cache, name.repo)
    path = repo.snapshot(listing.commit)
    transfer = Transfer(name, listing.commit, settings)
    with one_line_errors(name, settings):
        if ggufs:
            transfer.run(ggufs)
        else:  # a few MB
            transfer.run(settings_files(listing, trusts_code), shows_progress=False)
        if ggufs or not repo.has_ref(name.revision):  # else only the weights make it complete
            repo.write_ref(name.revision, listing.commit)
    return HubModel(name, path / ggufs[0].path if ggufs else path, settings, listing)


def _offline(name: HubName, settings: HubSettings) -> HubModel:
    problem = f"{name}: HF_HUB_OFFLINE is set"
    model = _cached(name, settings, problem)
    if model is None:
        raise ModelFilesError(
            f"{problem}, and {CachedRepo(settings.cache, name.repo).folder} has no copy of it; unset HF_HUB_OFFLINE, "
            f"or set --model_dir to a folder"
        )
    return model


def _cached(name: HubName, settings: HubSettings, problem: str) -> HubModel | None:
    snapshot = CachedRepo(settings.cache, name.repo).find_snapshot(name)
    path = snapshot / name.file if snapshot is not None and name.file is not None else snapshot
    return HubModel(name, path, settings, None, problem) if path is not None and path.exists() else None
