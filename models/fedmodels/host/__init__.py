"""The machine: its processes, files, devices, limits and ports."""
