"""Checks a dashboard against Grafana's schema, from which the classes of grafana-foundation-sdk are generated.

Usage: check_dashboard.py FILE. The classes drop members that the schema does not have. The parsed dashboard is
therefore written again and compared with the file. The types of its members are compared as well.
"""

import enum
import json
import sys
import typing

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as schema


def lost(path, file, parsed):
    """Yields the members of `file` that `parsed` lacks or changes."""
    if isinstance(file, dict) and isinstance(parsed, dict):
        for name, value in file.items():
            if name not in parsed:
                yield f"{path}.{name}: not in the schema"
            else:
                yield from lost(f"{path}.{name}", value, parsed[name])
    elif isinstance(file, list) and isinstance(parsed, list) and len(file) == len(parsed):
        for index, (before, after) in enumerate(zip(file, parsed)):
            yield from lost(f"{path}[{index}]", before, after)
    elif file != parsed:
        yield f"{path}: {file!r} becomes {parsed!r}"


def is_of(kind, value):
    """Returns whether `value` has the annotated type `kind`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in (typing.Any, object):
        return True
    if kind is None or kind is type(None):
        return value is None
    if origin is typing.Union:
        return any(is_of(one, value) for one in args)
    if origin is typing.Literal:
        return value in args
    if origin is list:
        return isinstance(value, list) and all(is_of(args[0], one) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(is_of(args[1], one) for one in value.values())
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return any(value == one or value == one.value for one in kind)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)


def mistyped(path, value):
    """Yields the members of `value` whose type differs from that of the schema."""
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from mistyped(f"{path}[{index}]", one)
    elif type(value).__module__.startswith("grafana_foundation_sdk.models") and not isinstance(value, enum.Enum):
        module = sys.modules[type(value).__module__]
        kinds = typing.get_type_hints(type(value), vars(module))
        for name, kind in kinds.items():
            member = getattr(value, name)
            if not is_of(kind, member):
                yield f"{path}.{name}: {member!r} is no {kind}"
            yield from mistyped(f"{path}.{name}", member)


plugins.register_default_plugins()
with open(sys.argv[1], encoding="utf-8") as file:
    content = json.load(file)
parsed = schema.Dashboard.from_json(content)
written = json.loads(JSONEncoder().encode(parsed))
problems = [*lost("dashboard", content, written), *mistyped("dashboard", parsed)]
if problems:
    sys.exit("\n".join(problems))
print(f"{len(content['panels'])} panels have the schema of Grafana")
