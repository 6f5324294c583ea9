"""What is learned and how: methods, networks, metrics and the numbers behind them.

Nothing here opens a socket, reads a clock or, but for :mod:`fedmodels.tensors.archive`, touches
a file.
"""

import sys

if sys.platform == "win32":  # before anything asks for fcntl or fork
    sys.exit("error: fedtide does not run on Windows, which lacks fork and fcntl; use Linux")
