"""What both halves of a run know of its parts; ``config/combinations.py`` has the list.

A method's contract (``training/method.py``) names no part. What a part can find out of a method, it
finds out. For the rest it has a table by method, and a class of one's own an attribute
(``asked.py``).
"""
