"""A sweep: methods × seeds × settings as runs of their own, and the tables that compare them."""
