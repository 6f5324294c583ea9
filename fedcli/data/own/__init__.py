"""Data sets of one's own in the forms that people have: tables, torch data sets, Hugging Face.

May import ``fedcli.data.sets``. The registry there loads these modules by name, when asked for.
"""
