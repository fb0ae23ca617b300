"""A skipped comparison proves nothing: if any oracle test is skipped, the run fails."""

from __future__ import annotations

import pytest


def _skipped(config: pytest.Config) -> list[pytest.TestReport | pytest.CollectReport]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get("skipped", []) if reporter else []


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _skipped(session.config) and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for report in _skipped(config):
        terminalreporter.write_line(f"FAILED {report.nodeid}: oracle tests may not be skipped", red=True)
