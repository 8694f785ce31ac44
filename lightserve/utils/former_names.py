"""Names of flags and metrics in the last release. They still work, unlisted, and go with the next one."""

FLAGS: dict[str, tuple[str, ...]] = {}  # by flag
METRICS: dict[str, str] = {}  # by former name
