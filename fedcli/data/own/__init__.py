"""Custom data sets in the forms that people have: tables, torch data sets, Hugging Face.

The registry of ``fedcli.data.sets`` loads these modules by name, when they are asked for.
"""
