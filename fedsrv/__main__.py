"""``python -m fedsrv`` is the command ``fedsrv``."""

from fedsrv.cli import main

main()
