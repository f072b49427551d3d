"""The ``deltastore`` command: one file per verb."""
