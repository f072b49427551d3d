"""One tree of errors: what callers catch, what programs read, what survives a pipe."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from deltastore import errors
from deltastore.errors import Backend, DeltaStoreError, OutcomeUnknown

KINDS = {
    "DeltaStoreError": ("error", 1),
    "InvalidInput": ("invalid_input", 2),
    "NotFound": ("not_found", 3),
    "Conflict": ("conflict", 4),
    "AlreadyExists": ("already_exists", 5),
    "ReadOnly": ("read_only", 6),
    "Corruption": ("corruption", 7),
    "UnsupportedFormat": ("unsupported_format", 8),
    "Timeout": ("timeout", 9),
    "Backend": ("backend", 10),
    "OutcomeUnknown": ("outcome_unknown", 11),
    "MissingDependency": ("missing_dependency", 12),
    "Internal": ("internal", 70),
}
"""Append only: programs and scripts compare these."""

STANDARD = {
    "NotFound": LookupError,
    "InvalidInput": ValueError,
    "Timeout": TimeoutError,
    "Backend": OSError,
    "OutcomeUnknown": Backend,
    "MissingDependency": ImportError,
}

CLASSES: dict[str, type[DeltaStoreError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, DeltaStoreError)
}
every = pytest.mark.parametrize("kind", CLASSES.values(), ids=list(CLASSES))


def test_kinds_and_exit_codes_are_never_changed() -> None:
    assert {name: (kind.kind, kind.exit_code) for name, kind in CLASSES.items()} == KINDS


def test_kinds_and_exit_codes_are_different() -> None:
    assert len({kind for kind, _ in KINDS.values()}) == len({code for _, code in KINDS.values()}) == len(KINDS)
    assert all(0 < code < 126 for _, code in KINDS.values())


@every
def test_the_tree(kind: type[DeltaStoreError]) -> None:
    standard = STANDARD.get(kind.__name__)
    assert standard is None or issubclass(kind, standard)
    assert not issubclass(kind, KeyError)
    for other in (ValueError, OSError, LookupError, ImportError):
        allowed = standard is not None and issubclass(standard, other)
        assert issubclass(kind, other) == allowed


@every
def test_every_error_is_in_the_docstring(kind: type[DeltaStoreError]) -> None:
    assert kind.__doc__
    assert kind.__name__ in (errors.__doc__ or "")


@every
def test_text_and_fields(kind: type[DeltaStoreError]) -> None:
    error = kind("chunk 7 of 'w'", where="packs/x.zip", expected=1, found=None)
    assert str(error) == error.message == "chunk 7 of 'w'"
    assert (error.where, error.expected, error.found) == ("packs/x.zip", 1, None)
    assert set(error.fields) >= {"where", "expected", "found"}
    with pytest.raises(AttributeError, match=f"{kind.__name__} has no field 'offset'"):
        error.offset  # noqa: B018
    assert getattr(error, "offset", 5) == 5


@every
def test_errors_survive_a_pipe(kind: type[DeltaStoreError]) -> None:
    error = kind("what, where", step=5, path=("a", 0), name="x")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        back: DeltaStoreError = pickle.loads(pickle.dumps(error, protocol))
        assert type(back) is kind
        assert (str(back), back.fields, back.step, back.path) == (str(error), error.fields, 5, ("a", 0))
    again: DeltaStoreError = copy.deepcopy(error)
    assert (type(again), again.fields) == (kind, error.fields)


@pytest.mark.parametrize("kind", [Backend, OutcomeUnknown])
def test_errors_of_the_storage_carry_errno(kind: type[Backend]) -> None:
    error: Any = pickle.loads(pickle.dumps(kind("full", errno=28, transient=True)))
    assert (error.errno, error.transient, str(error)) == (28, True, "full")
    plain = kind("refused")
    assert (plain.errno, plain.transient) == (None, False)
    with pytest.raises(OSError, match="full") as caught:
        raise error
    assert caught.value.errno == 28


def test_a_message_that_looks_like_a_format_is_left_alone() -> None:
    assert str(DeltaStoreError("100 % of {this} %s")) == "100 % of {this} %s"
