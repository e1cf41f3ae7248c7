"""What wirecall.toml and the environment say of an app in a file, and of serving it; named as the options of `serve`."""

from typing import Any

# The name of an option, by the place of its value in the file.
_OPTIONS = {
    "server.app": "app",
    "server.http": "http",
    "server.workers": "workers",
    "server.server": "server",
    "server.grace": "grace",
    "server.hosts": "hosts",
    "server.origins": "origins",
    "ledger.url": "ledger",
}


def serve_settings(path: str | None = None) -> dict[str, Any]:
    """Only what was stated; flags go on top of it. A mistake is a `UsageError` with the line it stands on."""
    from wirecall.config import load_config

    stated = load_config(path).stated()
    settings = {option: stated[place] for place, option in _OPTIONS.items() if place in stated}
    limits = {place.removeprefix("limits."): value for place, value in stated.items() if place.startswith("limits.")}
    if "audit.file" in stated:
        settings["audit"] = f"file:{stated['audit.file']}"
    return settings | ({"limits": limits} if limits else {})
