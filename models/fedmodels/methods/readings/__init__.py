"""What papers leave open: for each method a table of switches, ``[method.reading]`` in a config.

A field here settles how a paper is read; a hyper-parameter of the paper is a field of the method.
May import what methods may import.
"""
