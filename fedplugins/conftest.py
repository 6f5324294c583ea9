"""The fixtures of the core's tests, for the tests of each plugin."""

from tests.conftest import (  # noqa: F401
    digits,
    experiment,
    fork_server,
    pytest_collection,
    pytest_collection_modifyitems,
    pytest_make_collect_report,
    pytest_runtest_makereport,
    pytest_runtest_setup,
    steer,
    synced,
    whole_run,
)
