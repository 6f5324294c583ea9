"""One site's disk is full: the run waits for it, and ends as any other once there is room."""

import subprocess

import pytest

from tests.integration.conftest import tables
from tests.integration.harness import until

pytestmark = pytest.mark.loopback


@pytest.fixture
def small_disk(tmp_path):
    """Return a directory on a disk of its own, which holds 256 kB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a disk of its own takes the right to mount one")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_of_one_site_costs_nothing_but_time(loopback, small_disk):
    run = loopback(tables("fedrep", net={"name": "mlp", "hidden": [16]}))
    server = run.serve()
    full = run.join("2", states=small_disk)
    until(lambda: "waiting for orders" in full.output(), "the client does not join")
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(1 << 20))
    others = run.join("0-1")
    until(lambda: "trying again in" in full.output(), "the client does not wait for room")
    filler.unlink()
    assert (server.wait(), others.wait(), full.wait()) == (0, 0, 0)
    assert "Traceback" not in full.output()
