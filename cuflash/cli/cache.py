"""The disk cache of compiled kernels: ``info`` shows it, ``clear`` empties it, ``path`` prints where it is."""

from __future__ import annotations

import argparse

from ..settings import Settings, read_settings
from .screen import Screen


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("info", "clear", "path"))


def run(args: argparse.Namespace, screen: Screen) -> int:
    from ..cache import open_cache

    settings = read_settings()
    if args.action == "path":
        if settings.cache_dir is None:
            raise ValueError("there is no cache directory, because there is no home; CUFLASH_CACHE_DIR can name one")
        screen.line(str(settings.cache_dir))
        return 0
    if args.action == "clear":
        cache = open_cache(settings)
        screen.line(f"removed {cache.clear() if cache else 0} kernels")
        return 0
    screen.pairs(cache_items(settings))
    return 0


def cache_items(settings: Settings) -> dict[str, str]:
    """The cache in names and values."""
    from ..cache import LAYOUT, open_cache
    from ..text import size

    cache = open_cache(settings)
    items = {"path": str(settings.cache_dir) if settings.cache_dir else "none: there is no home directory"}
    if cache is None:
        items["state"] = "off" if settings.cache_dir else "unusable"
    else:
        info = cache.info()
        items["kernels"] = str(info.entries)
        items["size"] = f"{size(info.size)} of at most {size(info.max_bytes)}"
    if settings.prebuilt_dir:
        folder = settings.prebuilt_dir / LAYOUT
        count = sum(1 for _ in folder.glob("cuflash_*")) if folder.is_dir() else 0
        items["prebuilt"] = f"{count} kernels in {settings.prebuilt_dir}"
    return items
