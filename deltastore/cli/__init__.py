"""The ``deltastore`` command: one file per verb, :mod:`deltastore.cli.app` puts them together."""

from __future__ import annotations

from deltastore.cli.app import app, main

__all__ = ["app", "main"]
