"""Verbs (resume, lineage, report, relay, stay, upgrade, forget) × parts of the table of parts.

``make test`` runs the cells of resume, lineage, report and upgrade of parts with code of their own,
``make test-whole`` all cells.
"""
