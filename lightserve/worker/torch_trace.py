"""What torch and the GPU do during a profile, by torch.profiler."""

from __future__ import annotations

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile

from lightserve.common.device import Device


class TorchTrace:
    def __init__(self, platform: Device) -> None:
        self._platform = platform
        self._profile: profile | None = None

    def prepare(self) -> None:
        """Call it in the thread that imported torch: the libraries of the profiler insist on it for their first use."""
        with self._new_profile():
            pass

    def start(self) -> None:
        self._profile = self._new_profile()
        self._profile.start()

    def stop(self, path: str) -> None:
        current, self._profile = self._profile, None
        if current is not None:
            current.stop()
            current.export_chrome_trace(path)

    def _new_profile(self) -> profile:
        """Steps run in other threads than the one that starts the profile."""
        activities = self._platform.trace_activities()
        return profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))
