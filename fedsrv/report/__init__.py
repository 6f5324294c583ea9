"""What a finished or running run shows: tables, quantities, figures, the page.

Reads run directories alone.
"""
