"""Everything that can go wrong at an edge, as one tree; each class carries its HTTP status.

    Error
    ├── ConfigError                     a pool file, scenario or flag is wrong
    ├── CallerError            400      the client's request is wrong
    │   ├── UnknownModel       404
    │   ├── UnknownProgram     404
    │   ├── Conflict           409      a turn of a finished program, a verdict against a recorded one
    │   └── Unprocessable      422      a value out of range
    ├── Overloaded             503      carries retry_after_s
    ├── JournalError                    a journal cannot be read or written
    │   └── SchemaMismatch
    └── LawBroken                       a bug of ours: a law of docs/laws.md does not hold

Expected outcomes (a refused reservation, a held turn) are values, not exceptions.
"""


class Error(Exception):
    """Root of the tree. `code` is the stable machine-readable word of an answer's `error.code`."""

    status: int = 500
    code: str = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(Error):
    code = "config_error"


class CallerError(Error):
    status = 400
    code = "bad_request"


class UnknownModel(CallerError):
    status = 404
    code = "model_not_found"


class UnknownProgram(CallerError):
    status = 404
    code = "program_not_found"


class Conflict(CallerError):
    status = 409
    code = "conflict"


class Unprocessable(CallerError):
    status = 422
    code = "out_of_range"


class Overloaded(Error):
    status = 503
    code = "overloaded"

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message, code=code, param=param)
        self.retry_after_s = retry_after_s


class JournalError(Error):
    code = "journal_error"


class SchemaMismatch(JournalError):
    code = "schema_mismatch"


class LawBroken(Error):
    """A law of docs/laws.md does not hold: always a bug of ours, never the caller's fault."""

    code = "law_broken"

    def __init__(self, law: str, story: str) -> None:
        super().__init__(f"{law} broken: {story}")
        self.law = law
        self.story = story
