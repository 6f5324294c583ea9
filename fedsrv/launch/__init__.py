"""A run on one machine: the processes of coordinator and clients, started, watched and ended.

May import every other room of fedsrv.
"""
