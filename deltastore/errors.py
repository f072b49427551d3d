"""Every error that deltastore raises: one tree, cut by what the caller would do.

``DeltaStoreError``
    ``NotFound``            there is no such store, commit, tag or leaf (also LookupError)
    ``Conflict``            somebody else writes, or this writer was fenced by a newer one
    ``AlreadyExists``       the name is taken
    ``ReadOnly``            the store was opened with mode "r"
    ``InvalidInput``        the caller's value cannot be used (also ValueError)
    ``Corruption``          stored bytes are not what the format promises
    ``UnsupportedFormat``   a newer format, or a feature that this reader lacks
    ``Timeout``             the wait ended before the work did (also TimeoutError)
    ``Backend``             the storage refused; ``transient`` says whether a retry may help (also OSError)
    ``OutcomeUnknown``      the commit may have landed; read back before you decide
    ``MissingDependency``   an extra is not installed (also ImportError)
    ``Internal``            a bug in deltastore: please report it
"""

from __future__ import annotations

from typing import Any


class DeltaStoreError(Exception):
    """Base of all errors of deltastore.

    Parameters
    ----------
    message : str
        What, where, found against expected, and the next step.
    **fields
        The facts of the message, for programs; each becomes an attribute.
    """

    kind: str = "error"
    exit_code: int = 1

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")


def _rebuild(cls: type[DeltaStoreError], message: str, fields: dict[str, Any]) -> DeltaStoreError:
    return cls(message, **fields)


class NotFound(DeltaStoreError, LookupError):
    """There is no such store, commit, tag or leaf."""

    kind = "not_found"
    exit_code = 3


class Conflict(DeltaStoreError):
    """Another writer holds the store, or a newer one has fenced this one."""

    kind = "conflict"
    exit_code = 4


class AlreadyExists(DeltaStoreError):
    """The name is taken and the call does not overwrite."""

    kind = "already_exists"
    exit_code = 5


class ReadOnly(DeltaStoreError):
    """The store was opened for reading only."""

    kind = "read_only"
    exit_code = 6


class InvalidInput(DeltaStoreError, ValueError):
    """The caller's value cannot be used; nothing was written."""

    kind = "invalid_input"
    exit_code = 2


class Corruption(DeltaStoreError):
    """Stored bytes are not what the format promises; they were not used."""

    kind = "corruption"
    exit_code = 7


class UnsupportedFormat(DeltaStoreError):
    """The store needs a newer reader, or a feature that this one lacks."""

    kind = "unsupported_format"
    exit_code = 8


class Timeout(DeltaStoreError, TimeoutError):
    """The wait ended before the work did; the work goes on."""

    kind = "timeout"
    exit_code = 9


class Backend(DeltaStoreError, OSError):
    """The storage refused a request; nothing became visible by halves.

    ``errno`` is that of the operating system where it gave one.
    """

    kind = "backend"
    exit_code = 10
    transient: bool = False

    def __init__(self, message: str, *, errno: int | None = None, transient: bool = False, **fields: Any) -> None:
        super().__init__(message, errno=errno, transient=transient, **fields)


class OutcomeUnknown(Backend):
    """The commit may have landed; read back before you decide."""

    kind = "outcome_unknown"
    exit_code = 11


class MissingDependency(DeltaStoreError, ImportError):
    """An optional package is not installed; the message names the extra."""

    kind = "missing_dependency"
    exit_code = 12


class Internal(DeltaStoreError):
    """A bug in deltastore: an invariant does not hold."""

    kind = "internal"
    exit_code = 70
