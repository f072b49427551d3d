"""``python -m deltastore.cli``: the command, where it is not on PATH."""

from __future__ import annotations

from deltastore.cli.app import main

main()
