"""`loadwise presets [NAME]`."""

import argparse

from loadwise.kernel.errors import ConfigError

from .output import add_json_flag, columns, put, put_json

DESCRIPTION = "List the presets, or show what one of them lays below a pool file."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`[NAME]`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this one")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print them."""
    from loadwise.settings import preset_names, read_preset

    names = preset_names()
    if arguments.name is not None and arguments.name not in names:
        raise ConfigError(f"preset {arguments.name!r} is unknown; known: {', '.join(names)}")
    if arguments.name is not None:
        _show(arguments.name, read_preset(arguments.name), as_json=arguments.json)
        return 0
    description_by_name = {name: str(read_preset(name)["description"]) for name in names}
    if arguments.json:
        put_json({"presets": description_by_name})
    else:
        put(columns(list(description_by_name.items())))
    return 0


def _show(name: str, preset: dict[str, object], *, as_json: bool) -> None:
    import yaml

    if as_json:
        put_json({"name": name, **preset})
    else:
        put(yaml.safe_dump(preset, sort_keys=False, width=120).rstrip())
