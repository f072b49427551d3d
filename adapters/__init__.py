"""The training side: what takes the state out of a running loop and puts it back, one module per framework.

Imported as ``deltastore.adapters`` (``deltastore/adapters`` is a link to this folder), never as ``adapters``.
"""
