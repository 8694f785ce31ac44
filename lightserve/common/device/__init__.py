"""What LightServe asks of hardware.

``base.py`` says what a device must offer; ``cpu.py`` and ``cuda.py`` are the built-in ones, and ``registry.py`` finds
them by name, together with those of other packages. ``profile.py`` holds what differs between GPU models, and the
``DeviceTraits`` of common.ops hold what kernels may use. Other packages use a ``Device``. Exceptions: drivers are
looked for by ``utils.drivers`` before torch is imported, and kernels launch on streams.
"""

from lightserve.common.device.base import (
    API_VERSION,
    AsyncCopy,
    Device,
    Driver,
    Event,
    Graphs,
    MappedMemory,
    MappedPool,
    MemoryMapper,
    Streams,
    check_driver,
    check_head_dim,
    in_host_memory,
    shown_name,
)
from lightserve.common.device.memory import explain_out_of_memory
from lightserve.common.device.profile import H200, H200_GRAPHS, GraphRanges, Profile
from lightserve.common.device.registry import (
    copy_to_host,
    device_named,
    device_of,
    host_memory,
    pick_device,
    to_device,
    unusable_packages,
)
from lightserve.common.ops import DeviceTraits

__all__ = [
    "API_VERSION",
    "H200",
    "H200_GRAPHS",
    "AsyncCopy",
    "Device",
    "DeviceTraits",
    "Driver",
    "Event",
    "GraphRanges",
    "Graphs",
    "MappedMemory",
    "MappedPool",
    "MemoryMapper",
    "Profile",
    "Streams",
    "check_driver",
    "check_head_dim",
    "copy_to_host",
    "device_named",
    "device_of",
    "explain_out_of_memory",
    "host_memory",
    "in_host_memory",
    "pick_device",
    "shown_name",
    "to_device",
    "unusable_packages",
]
