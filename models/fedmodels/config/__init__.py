"""What an experiment's file may say: the tables of a TOML file and the scenarios.

May import ``errors`` and ``own_code``.
"""
