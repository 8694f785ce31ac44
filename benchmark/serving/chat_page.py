"""The chat page in Chromium: bytes that it loads, the time to its first paint, and pictures of it.

    python -m benchmark.serving.chat_page --loads 10 --pictures docs/images [flags of the server]

Loads with an empty cache and with a filled one alternate. The first load, which compresses the files, does not count.
The model is the null worker unless the flags have another one: the page does not wait for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from benchmark.serving.server import Server

CHROMIUM, CHROMEDRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")
SIZES = {"chat": (1280, 900), "chat_dark": (1280, 900), "chat_narrow": (390, 800)}  # of pictures, by name
READ = """
const done = arguments[0];
const read = () => {
  const [paint] = performance.getEntriesByName("first-contentful-paint");
  if (paint === undefined || document.readyState !== "complete") return setTimeout(read, 20);
  const files = performance.getEntriesByType("resource").filter((entry) => entry.name.includes("/web/"));
  const sizes = [...files, ...performance.getEntriesByType("navigation")].map((entry) => entry.transferSize);
  done({ paint_ms: paint.startTime, files: sizes.length, bytes: sizes.reduce((sum, size) => sum + size, 0) });
};
read();
"""
ANSWER = r"""A cubic Bézier curve is a polynomial in $t$:

$$B(t) = \sum_{i=0}^{3} \binom{3}{i} (1-t)^{3-i} t^i P_i$$

```python
def point(t: float, points: list[complex]) -> complex:
    # de Casteljau's algorithm
    while len(points) > 1:
        points = [a + t * (b - a) for a, b in zip(points, points[1:])]
    return points[0]
```

| method | operations | stable |
|---|---|---|
| de Casteljau | O(n²) | yes |
| Horner | O(n) | less |
"""
MESSAGES = [
    {"role": "user", "content": "How do I compute a point of a Bézier curve?"},
    {"role": "assistant", "content": ANSWER, "finishReason": "stop"},
]


class Load(NamedTuple):
    first_paint_ms: float
    files: int
    num_bytes: int  # over the network, with headers


def browser(folder: str) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))


def load(chrome: webdriver.Chrome, url: str, is_cached: bool) -> Load:
    if not is_cached:
        chrome.execute_cdp_cmd("Network.clearBrowserCache", {})
    chrome.get(url)
    read = chrome.execute_async_script(READ)
    return Load(read["paint_ms"], read["files"], read["bytes"])


def describe(name: str, loads: Sequence[Load]) -> str:
    ms = sorted(each.first_paint_ms for each in loads)
    size = f"{loads[-1].files} files, {loads[-1].num_bytes / 1e3:.1f} kB"
    return f"{name}: {size}; first paint after {statistics.median(ms):.0f} ms ({ms[0]:.0f} to {ms[-1]:.0f})"


def take_pictures(chrome: webdriver.Chrome, url: str, folder: Path) -> None:
    chat = {"id": "a", "title": "Bézier curves", "updated": 1, "settings": {}, "messages": MESSAGES}
    store = "localStorage.setItem('lightserve:/:conversation:a', arguments[0])"
    chrome.execute_script(store, json.dumps(chat))
    for name, size in SIZES.items():
        # a window of Chromium is at least 500 pixels wide
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        theme = "dark" if name == "chat_dark" else "light"
        feature = {"name": "prefers-color-scheme", "value": theme}
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        load(chrome, url, is_cached=True)
        chrome.save_screenshot(str(folder / f"{name}.png"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=10, help="of each kind")
    parser.add_argument("--pictures", type=Path, help="a folder for chat.png, chat_dark.png and chat_narrow.png")
    args, flags = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(flags or ["--null_worker"])
        chrome = browser(folder)
        try:
            url = f"{server.wait_until_ready()}/"
            load(chrome, url, is_cached=False)
            kinds = "empty cache", "filled cache"
            loads: dict[str, list[Load]] = {kind: [] for kind in kinds}
            for _ in range(args.loads):
                for kind in kinds:
                    loads[kind].append(load(chrome, url, is_cached=kind == kinds[1]))
            for kind in kinds:
                print(describe(kind, loads[kind]))
            if args.pictures is not None:
                take_pictures(chrome, url, args.pictures)
        finally:
            chrome.quit()
            server.stop()


if __name__ == "__main__":
    main()
