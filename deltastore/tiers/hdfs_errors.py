"""What an answer of HDFS means, whatever class or status code it comes with: as the errno that a local disk would give.

WebHDFS answers 403 to almost everything, and pyhdfs knows the classes of some of it only; so names and texts decide.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass

NOT_NOW = errno.EAGAIN
"""Nothing was done, and later it may be: safe mode, start-up, standby, no DataNode at this moment."""
UNANSWERED = errno.ETIMEDOUT
"""No answer came, or half of one: what was asked for may have been done, or may still be done."""

PASSING = (NOT_NOW, UNANSWERED)
"""Worth asking again after a moment."""

_BY_NAME: Mapping[str, int] = {
    "AccessControlException": errno.EACCES,
    "AlreadyBeingCreatedException": errno.EEXIST,
    "AuthorizationException": errno.EACCES,
    "DSQuotaExceededException": errno.EDQUOT,
    "EOFException": UNANSWERED,  # the DataNode lost the NameNode in the middle of our request
    "FileAlreadyExistsException": errno.EEXIST,
    "FileNotFoundException": errno.ENOENT,
    "NSQuotaExceededException": errno.EDQUOT,
    "NotReplicatedYetException": NOT_NOW,
    "ParentNotDirectoryException": errno.ENOTDIR,
    "PathIsNotEmptyDirectoryException": errno.ENOTEMPTY,
    "QuotaByStorageTypeExceededException": errno.EDQUOT,
    "RecoveryInProgressException": NOT_NOW,
    "RetriableException": NOT_NOW,
    "SafeModeException": NOT_NOW,
    "SecurityException": errno.EACCES,
    "StandbyException": NOT_NOW,
}
_BY_TEXT = (
    ("Failed to find datanode", NOT_NOW),
    ("No active and not excluded nodes", NOT_NOW),
    ("could only be written to 0", errno.ENOSPC),
    ("All datanodes", UNANSWERED),  # "... are bad. Aborting": the pipeline of one upload broke
    ("Connection refused", UNANSWERED),
    ("Failed on local exception", UNANSWERED),
    ("quota", errno.EDQUOT),
    ("Hadoop IPC port", errno.EINVAL),  # the NameNode says so itself
)
_BY_STATUS: Mapping[int, int] = {401: errno.EACCES, 404: errno.ENOENT, 500: UNANSWERED, 502: UNANSWERED, 503: NOT_NOW}


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a request failed."""

    errno: int
    text: str
    """One line, for users."""


def read_trouble(error: Exception) -> Trouble | None:
    """Return what an error of pyhdfs, requests or urllib3 means; None if it is of another origin."""
    package = type(error).__module__.partition(".")[0]
    text = _first_line(error)
    if isinstance(error, AssertionError) and "SecurityException" in text:
        return Trouble(errno.EACCES, "HDFS refused who we are (SecurityException): give a user or a session that may")
    if package in ("requests", "urllib3") or type(error).__name__ == "HdfsNoServerException":
        return Trouble(UNANSWERED, text)
    if package != "pyhdfs":
        return None
    name = str(getattr(error, "exception", ""))
    if name in _BY_NAME:
        return Trouble(_BY_NAME[name], f"{name}: {text.removeprefix(f'{name} - ')}")
    for part, number in _BY_TEXT:
        if part in text:
            return Trouble(number, text)
    status = getattr(error, "status_code", None)
    if status is None:
        return _read_page(text)
    return Trouble(_BY_STATUS.get(status, errno.EIO), text)


def _read_page(text: str) -> Trouble:
    """Read what is no answer of WebHDFS: a page of the web server or of a proxy before it."""
    status = re.search(r"\b(401|404|500|502|503)\b", text)
    if status is None:
        return Trouble(UNANSWERED, text)
    return Trouble(_BY_STATUS[int(status[1])], f"an HTTP server answered {status[1]} in place of WebHDFS")


def _first_line(error: Exception) -> str:
    """Return the message without the stack trace of Java."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]
