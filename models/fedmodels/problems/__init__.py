"""What may be learned in place of the class of an example: numbers, or several labels of each.

``targets`` says what both have in common, which is all that the rest of a run asks; ``numbers`` and
``labels`` are the two, loaded where a config asks for them.
"""
