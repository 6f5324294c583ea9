"""The tables and figures of the four papers, each as a file, and what our records have of them."""
