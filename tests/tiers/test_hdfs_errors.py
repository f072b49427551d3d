"""What each answer of HDFS means; the texts are those of real clusters."""

from __future__ import annotations

import errno

import pyhdfs
import pytest
import requests
import urllib3

from deltastore.tiers.hdfs_errors import NOT_NOW, UNANSWERED, read_trouble


def http(name: str, message: str, status: int = 403) -> Exception:
    kind = getattr(pyhdfs, f"Hdfs{name}", pyhdfs.HdfsHttpException)
    prefix = "" if kind is not pyhdfs.HdfsHttpException else f"{name} - "
    error: Exception = kind(prefix + message, exception=name, status_code=status)
    return error


CASES = [
    (http("SafeModeException", "Cannot create file/x. Name node is in safe mode."), NOT_NOW),
    (http("RetriableException", "Namenode is in startup mode"), NOT_NOW),
    (http("StandbyException", "Operation category READ is not supported in state standby"), NOT_NOW),
    (http("IOException", "Failed to find datanode, suggest to check cluster health. excludeDatanodes=null"), NOT_NOW),
    (http("IOException", "No active and not excluded nodes contain this block"), NOT_NOW),
    (http("EOFException", "End of File Exception between local host is: ..."), UNANSWERED),
    (http("IOException", "All datanodes [DatanodeInfoWithStorage[...]] are bad. Aborting..."), UNANSWERED),
    (http("IOException", "File /x could only be written to 0 of the 1 minReplication nodes."), errno.ENOSPC),
    (http("DSQuotaExceededException", "The DiskSpace quota of /x is exceeded: quota = 1"), errno.EDQUOT),
    (http("NSQuotaExceededException", "The NameSpace quota (directories and files) of ..."), errno.EDQUOT),
    (http("AccessControlException", "Permission denied: user=t, access=WRITE"), errno.EACCES),
    (http("FileNotFoundException", "File does not exist: /x", 404), errno.ENOENT),
    (http("FileAlreadyExistsException", "/x for client 127.0.0.1 already exists"), errno.EEXIST),
    (http("AlreadyBeingCreatedException", "Failed to CREATE_FILE /x for DFSClient"), errno.EEXIST),
    (http("IOException", "Specified block size is less than configured minimum value"), errno.EIO),
    (http("IllegalArgumentException", "Invalid value for webhdfs parameter", 400), errno.EIO),
    (http("RuntimeException", "java.lang.NullPointerException", 500), UNANSWERED),
    (pyhdfs.HdfsNoServerException("Could not use any of the given hosts"), UNANSWERED),
    (pyhdfs.HdfsException("Expected JSON. Is WebHDFS enabled? Got '<html>HTTP ERROR 401 Auth'"), errno.EACCES),
    (pyhdfs.HdfsException("Expected JSON. Is WebHDFS enabled? Got '503 Service Unavailable'"), NOT_NOW),
    (pyhdfs.HdfsException("Expected JSON. Is WebHDFS enabled? Got ''"), UNANSWERED),
    (pyhdfs.HdfsException("Got 'It looks like you are making an HTTP request to a Hadoop IPC port.'"), errno.EINVAL),
    (AssertionError("Expected status 401 for SecurityException, got 403"), errno.EACCES),
    (requests.ConnectionError("Connection aborted."), UNANSWERED),
    (requests.ReadTimeout("Read timed out."), UNANSWERED),
    (urllib3.exceptions.ProtocolError("Connection broken: IncompleteRead(5 bytes read)"), UNANSWERED),
]


@pytest.mark.parametrize(("error", "expected"), CASES, ids=[str(number) for number in range(len(CASES))])
def test_an_answer_is_read(error: Exception, expected: int) -> None:
    trouble = read_trouble(error)
    assert trouble is not None
    assert trouble.errno == expected
    assert trouble.text


@pytest.mark.parametrize("error", [ValueError("mine"), OSError(errno.EIO, "mine"), AssertionError("mine"), KeyError(1)])
def test_what_is_not_of_hdfs_passes(error: Exception) -> None:
    assert read_trouble(error) is None


def test_a_stack_trace_of_java_is_left_out() -> None:
    trouble = read_trouble(http("AccessControlException", "Permission denied: user=t\n\tat org.apache.hadoop.hdfs"))
    assert trouble is not None
    assert trouble.text == "AccessControlException: Permission denied: user=t"
