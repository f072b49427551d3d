"""What a session of our own takes from the environment, and when it goes on asking."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltastore.tiers.hdfs_connection import _new_session


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        for spelling in (name, name.upper()):
            monkeypatch.delenv(spelling, raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_an_environment_that_says_nothing_is_not_asked_again() -> None:
    session = _new_session()
    assert not session.trust_env
    assert session.verify is True


def test_certificates_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/ca.pem")
    session = _new_session()
    assert not session.trust_env
    assert session.verify == "/ca.pem"


def test_proxies_and_passwords_are_asked_for_each_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine h login l password p\n")
    assert _new_session().trust_env
    (tmp_path / ".netrc").unlink()
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert _new_session().trust_env
