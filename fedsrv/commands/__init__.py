"""The commands of ``fedsrv`` that have files of their own; ``fedsrv/cli.py`` has the others.

Heavy imports happen inside the commands that need them.
"""
