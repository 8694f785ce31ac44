"""The folder of --profile_dir: names of profiles, and the limits on their number and size."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

MAX_PROFILES = 10  # the oldest ones are removed
MAX_BYTES = 2 * 2**30  # of all profiles
MIN_FREE_BYTES = 256 * 2**20  # on the disk, before a profile starts
PREFIX, SUFFIX = "lightserve-profile-", ".json.gz"


class ProfileFolderError(Exception):
    """The folder cannot take another profile. The message is for the operator."""


class ProfileFolder:
    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._num_started = 0

    def new_profile(self) -> Path:
        """The path of a new profile. Old ones and parts of unfinished ones are removed."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._make_room()
            free = shutil.disk_usage(self._path).free
        except OSError as error:
            raise ProfileFolderError(f"--profile_dir cannot be used: {error}") from error
        if free < MIN_FREE_BYTES:
            raise ProfileFolderError(
                f"the disk of --profile_dir has {free / 2**20:.0f} MiB left; a profile needs {MIN_FREE_BYTES >> 20} MiB"
            )
        self._num_started += 1
        date = time.strftime("%Y%m%d-%H%M%S")
        return self._path / f"{PREFIX}{date}-{self._num_started}{SUFFIX}"

    def part_prefix(self, profile: Path) -> str:
        return str(profile.with_name(f".{profile.name.removesuffix(SUFFIX)}"))

    def remove_parts(self) -> None:
        for path in self._path.glob(f".{PREFIX}*.part"):
            with contextlib.suppress(OSError):
                path.unlink()

    def _make_room(self) -> None:
        self.remove_parts()
        profiles = sorted(self._path.glob(f"{PREFIX}*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        sizes = [path.stat().st_size for path in profiles]
        while profiles and (len(profiles) >= MAX_PROFILES or sum(sizes) > MAX_BYTES):
            profiles.pop(0).unlink()
            sizes.pop(0)
