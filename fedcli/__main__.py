"""``python -m fedcli`` is the command ``fedcli``."""

from fedcli.cli import main

main()
