"""The one kind of object that crosses a border between rooms: frozen, keyword-only, strict."""

import msgspec


class Fact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of events, commands, views, configuration and journal entries.

    Defaults are omitted when encoded: a journal holds what happened, not what might have been said about it.
    """
